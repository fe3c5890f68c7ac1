from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from lit_rl.cluster import Runtime, WorkerGroup

EXIT_3 = [sys.executable, "-c", "raise SystemExit(3)"]


def test_exit_codes_reach_drivers_and_workers(ray_runtime: Runtime) -> None:
    class Caller:
        def run(self) -> int:
            return subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode

    group = WorkerGroup.create(ray_runtime, Caller, 1, name="exit_codes")
    (worker,) = group.workers

    assert ray_runtime.loop.run(worker.call("run", timeout_s=60.0), timeout_s=60.0, what="the worker") == 3
    assert subprocess.run(EXIT_3, check=False).returncode == 3
    child = multiprocessing.get_context("spawn").Process(
        target=os._exit, args=(3,)
    )  # sys.exit may be a wrapper: wandb puts one in place
    child.start()
    child.join(60)
    assert child.exitcode == 3
    ray_runtime.loop.run(group.stop(5.0), timeout_s=30.0, what="the worker to stop")
