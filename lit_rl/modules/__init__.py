"""The algorithms: one LightningModule each, over the base that runs the update."""

from lit_rl.modules.cispo import CISPO
from lit_rl.modules.clip_cov import ClipCov
from lit_rl.modules.clipped_policy import ClippedPolicyModule
from lit_rl.modules.dapo import DAPO
from lit_rl.modules.decoupled_ppo import DecoupledPPO
from lit_rl.modules.distillation import OnPolicyDistillation
from lit_rl.modules.dppo import DPPO
from lit_rl.modules.dr_grpo import DrGRPO
from lit_rl.modules.dro import DRO
from lit_rl.modules.gdpo import GDPO
from lit_rl.modules.gmpo import GMPO
from lit_rl.modules.gpg import GPG
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.grpo import GRPO
from lit_rl.modules.gspo import GSPO
from lit_rl.modules.kl_cov import KLCov
from lit_rl.modules.lite_ppo import LitePPO
from lit_rl.modules.luspo import LUSPO
from lit_rl.modules.m2po import M2PO
from lit_rl.modules.max_rl import MaxRL
from lit_rl.modules.opo import OPO
from lit_rl.modules.optimal_token_baseline import OptimalTokenBaseline
from lit_rl.modules.pass_at_k import PassAtK
from lit_rl.modules.pf_ppo import PFPPO
from lit_rl.modules.policy_gradient import PolicyGradientModule
from lit_rl.modules.ppo import PPO
from lit_rl.modules.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from lit_rl.modules.remax import ReMax
from lit_rl.modules.rloo import RLOO
from lit_rl.modules.sapo import SAPO
from lit_rl.modules.sft import SFT
from lit_rl.modules.token_rewards import TokenRewardModule
from lit_rl.modules.turn_grpo import TurnGRPO
from lit_rl.modules.vapo import VAPO
from lit_rl.modules.vespo import VESPO

__all__ = [
    "CISPO",
    "ClipCov",
    "ClippedPolicyModule",
    "DAPO",
    "DPPO",
    "DRO",
    "DecoupledPPO",
    "DrGRPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "GroupRelativeModule",
    "KLCov",
    "LUSPO",
    "LitePPO",
    "M2PO",
    "MaxRL",
    "OPO",
    "OnPolicyDistillation",
    "OptimalTokenBaseline",
    "PFPPO",
    "PPO",
    "PassAtK",
    "PolicyGradientModule",
    "RLOO",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "SAPO",
    "SFT",
    "TokenRewardModule",
    "TurnGRPO",
    "VAPO",
    "VESPO",
]
