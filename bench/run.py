"""Run the benchmarks by group and print one JSON object of all their numbers as the last line.

Each group runs in a process of its own, with one thread per process, so that no group sees what another left behind. A
group that fails is named and makes the exit status 1; the others still run and their numbers are still printed.

Run: python bench/run.py, or python bench/run.py --only engine
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

GROUPS: dict[str, tuple[str, ...]] = {
    "algorithms": ("bench_algorithms",),
    "logprobs": ("bench_logprobs",),
    "engine": ("bench_planner", "bench_update"),
    "agents": ("bench_agents", "bench_tools", "bench_balancer"),
    "iteration": ("bench_iteration",),
    "search": ("bench_search",),
}
"""Group to its modules beside this file, each with ``run() -> dict[str, float]``."""

GROUP_TIMEOUT_S = 1800.0
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_modules(modules: tuple[str, ...], results_file: Path) -> bool:
    """Run the modules of a group in this process; return whether all succeeded."""
    results: dict[str, float] = {}
    succeeded = True
    for name in modules:
        try:
            results.update(importlib.import_module(name).run())
        except Exception:
            traceback.print_exc()
            succeeded = False
        # After every module: a later one that crashes or hangs takes only its own numbers along.
        results_file.write_text(json.dumps(results))
    return succeeded


def run_group(group: str) -> tuple[dict[str, float], bool]:
    """Run one group in a process of its own; return its numbers and whether all of it succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        results_file = Path(folder) / "results.json"
        command = [sys.executable, __file__, "--in-process", str(results_file), "--only", group]
        # A session of its own: at a time-out what the group started ends with it.
        process = subprocess.Popen(command, env={**os.environ, **ONE_THREAD}, start_new_session=True)
        try:
            succeeded = process.wait(GROUP_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            print(f"group {group}: not done after {GROUP_TIMEOUT_S:.0f} s, ended", file=sys.stderr)
            succeeded = False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return (json.loads(results_file.read_text()) if results_file.exists() else {}), succeeded


def main() -> int:
    """Run the asked groups; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(GROUPS), help="run this group alone")
    parser.add_argument("--in-process", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # The default action would end this process alone and leave the group's running.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    if arguments.in_process is not None:
        return 0 if run_modules(GROUPS[arguments.only], arguments.in_process) else 1

    results: dict[str, float] = {}
    failed: list[str] = []
    for group in [arguments.only] if arguments.only else GROUPS:
        print(f"== {group}", flush=True)
        numbers, succeeded = run_group(group)
        for key, value in numbers.items():
            print(f"{key}: {value:.4g}", flush=True)
        results.update(numbers)
        if not succeeded:
            failed.append(group)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    print(json.dumps(results), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
