"""Worker groups: many workers addressed as one, in Ray actors or in this process."""

from lit_rl.cluster.handle import WorkerDied, WorkerHandle
from lit_rl.cluster.runtime import EventLoopThread, Runtime
from lit_rl.cluster.worker_group import WorkerGroup, find_worker

__all__ = ["EventLoopThread", "Runtime", "WorkerDied", "WorkerGroup", "WorkerHandle", "find_worker"]
