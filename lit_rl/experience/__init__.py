"""From finished trajectories to mini-batches: planning, batching, loading, collecting."""

from lit_rl.experience.balance import karmarkar_karp, sequence_workload
from lit_rl.experience.plan import plan_iteration

__all__ = ["karmarkar_karp", "plan_iteration", "sequence_workload"]
