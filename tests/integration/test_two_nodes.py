"""Agent-loop workers over the nodes of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_workers_are_spread_over_nodes_and_a_lost_node_loses_no_trajectory(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_nodes.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "notes")], capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.strip().splitlines()[-1])
    assert result["both"] == [0, 1, 0, 1]  # round-robin, the driver's node first
    assert result["asked"] == [4, 4]
    assert result["asked_again_here"]
    assert result["texts"] == [str(number) for number in range(8)]
    assert result["alone"] == [0, 0, 0, 0]
