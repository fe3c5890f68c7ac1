"""Lightning strategies that train policies on several ranks."""

from lit_rl.strategies.checkpoints import check_checkpoint
from lit_rl.strategies.deepspeed import DeepSpeedStrategy
from lit_rl.strategies.fsdp2 import FSDP2Strategy
from lit_rl.strategies.supported import check_strategy

__all__ = ["DeepSpeedStrategy", "FSDP2Strategy", "check_checkpoint", "check_strategy"]
