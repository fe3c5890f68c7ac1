"""Worker groups: many workers addressed as one, in Ray actors or in this process."""

from lit_rl.cluster.dispatch import Broadcast, Dispatch, DispatchError, Execute, Mesh, MeshMember, Scatter, dispatch
from lit_rl.cluster.group_method import WorkerGroupError
from lit_rl.cluster.handle import RESTART_PAUSES_S, WorkerDied, WorkerHandle, call_again
from lit_rl.cluster.objects import fetch_object, put_object
from lit_rl.cluster.ray_host import ProcessIdentity
from lit_rl.cluster.runtime import EventLoopThread, Runtime
from lit_rl.cluster.worker_group import WorkerGroup, find_worker

__all__ = [
    "RESTART_PAUSES_S",
    "Broadcast",
    "Dispatch",
    "DispatchError",
    "EventLoopThread",
    "Execute",
    "Mesh",
    "MeshMember",
    "ProcessIdentity",
    "Runtime",
    "Scatter",
    "WorkerDied",
    "WorkerGroup",
    "WorkerGroupError",
    "WorkerHandle",
    "call_again",
    "dispatch",
    "fetch_object",
    "find_worker",
    "put_object",
]
