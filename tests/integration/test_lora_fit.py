"""RL with adapters: the engine gets merged weights, the reference is the policy without them."""

from __future__ import annotations

import pytest
import torch
from tiny_fit import MODEL, tiny_data, tiny_fit

from lit_rl import GRPO
from lit_rl.models import load_causal_lm
from lit_rl.models.lora import LoraSettings

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_engine_and_trainer_agree_and_only_adapters_are_trained(precision: str) -> None:
    module = GRPO(MODEL, actor_lr=1e-2, lora=LoraSettings(r=4), kl_loss_coef=0.1)
    frozen = {name: p.clone() for name, p in load_causal_lm(MODEL).named_parameters()}

    run = tiny_fit(3, module=module, precision=precision).fit()

    gaps = [gap for _, gap in run.logger.column("rollout_corr/logprob_gap_mean")]
    # In bfloat16 the trainer adds the adapter's rounded product, the engine holds the sum.
    assert max(gaps) < (1e-4 if precision == "32-true" else 0.1)
    kl = [value for _, value in run.logger.column("actor/kl_loss")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)  # the first policy is the reference
    assert kl[2] > 1e-3
    network = module.actor.network
    assert torch.equal(network.model.embed_tokens.weight, frozen["model.embed_tokens.weight"])
    base = network.model.layers[0].self_attn.q_proj
    assert torch.equal(base.base_layer.weight, frozen["model.layers.0.self_attn.q_proj.weight"])
    assert float(base.lora_B["default"].weight.detach().abs().max()) > 0


def test_an_attention_without_masks_does_not_go_with_shared_prompts() -> None:
    module = GRPO(MODEL, attn_implementation="flash_attention_2")

    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2' takes no mask.*share_prompts to"):
        tiny_fit(1, module=module, data=tiny_data(share_prompts=True)).fit()
