"""Modules that differ in their advantages: numbers worked out by hand on two groups, and what they ask of the data."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from lit_rl import modules
from lit_rl.experience.batch import Experience
from lit_rl.modules import (
    GDPO,
    GPG,
    OPO,
    RLOO,
    DrGRPO,
    LitePPO,
    MaxRL,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    TurnGRPO,
)  # fmt: skip
from lit_rl.types import Trajectory

# Rewards of group a: 1, 0, 0.5; of group b: 1, 1. Tokens: 2, 1, 3; 1, 2.
REWARDS = [1.0, 0.0, 0.5, 1.0, 1.0]
LENGTHS = [2, 1, 3, 1, 2]


@pytest.fixture
def experience(make_experience):
    trajectories = [
        Trajectory(
            row_id=group, group_id=group, prompt_ids=[5], response_ids=[7] * length, loss_mask=[1] * length,
            rollout_logprobs=[-1.0] * length, policy_versions=[0] * length, reward=reward,
        )
        for group, reward, length in zip("aaabb", REWARDS, LENGTHS, strict=True)
    ]  # fmt: skip
    return make_experience(trajectories)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (RLOO("unused"), [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 0.0, 0.0]),
        # The length-weighted mean of group a is (2 * 1 + 1 * 0 + 3 * 0.5) / 6.
        (OPO("unused"), [1 - 3.5 / 6, -3.5 / 6, 0.5 - 3.5 / 6, 0.0, 0.0]),
        (MaxRL("unused"), [1.0, -1.0, 0.0, 0.0, 0.0]),
        (PassAtK("unused", normalize_std=False), [0.5, 0.0, 0.0, 0.0, 0.0]),
        # The sample standard deviation of group a is 0.5.
        (PassAtK("unused"), [1.0, 0.0, 0.0, 0.0, 0.0]),
        (DrGRPO("unused", loss_scale=4.0), [0.5, -0.5, 0.0, 0.0, 0.0]),
        # All five rewards have mean 0.7 and sample variance 0.2.
        (LitePPO("unused"), [0.5 / 0.2**0.5, -0.5 / 0.2**0.5, 0.0, 0.0, 0.0]),
        # Four of five rewards are not 0.
        (GPG("unused", norm=2.0), [0.5 * 1.25 / 2, -0.5 * 1.25 / 2, 0.0, 0.0, 0.0]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_advantages_are_those_of_the_formula(experience, module, expected):
    torch.testing.assert_close(module.compute_advantages(experience), torch.tensor(expected), atol=2e-6, rtol=1e-5)


def test_reinforce_plus_plus_baseline_has_one_spread_for_all_prompts(experience):
    # Centred rewards over tokens: 0.5 twice, -0.5 once, 0 six times; mean 0.5 / 9.
    tokens = torch.tensor([0.5, 0.5, -0.5] + [0.0] * 6)
    expected = (torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0]) - tokens.mean()) / tokens.std()

    advantages = ReinforcePlusPlusBaseline("unused").compute_advantages(experience)

    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-4)


def test_reinforce_plus_plus_whitens_discounted_returns(experience):
    module = ReinforcePlusPlus("unused", gamma=0.5)
    module.sum_over_ranks = lambda values: values
    returns = [[0.5, 1.0], [0.0], [0.125, 0.25, 0.5], [1.0], [0.5, 1.0]]
    tokens = torch.tensor([value for row in returns for value in row])

    advantages = module.compute_advantages(experience)

    assert advantages.shape == (5, 3)
    for row, values in enumerate(returns):
        expected = (torch.tensor(values) - tokens.mean()) / tokens.std()
        torch.testing.assert_close(advantages[row, : len(values)], expected, atol=1e-5, rtol=1e-4)
        assert not advantages[row, len(values) :].any()


def test_remax_takes_the_greedy_reward_off_and_is_silent_where_it_failed(experience):
    experience.greedy_rewards = torch.tensor([0.25, 0.25, 0.25, float("nan"), float("nan")])

    advantages = ReMax("unused").compute_advantages(experience)

    expected = [[0.75, 0.75, 0.0], [-0.25, 0.0, 0.0], [0.25, 0.25, 0.25], [0.0] * 3, [0.0] * 3]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_the_kl_penalty_is_taken_off_at_every_token_and_moves_its_coefficient(experience):
    module = ReinforcePlusPlus("unused", kl_reward_coef=0.5, kl_reward_target=0.1, kl_reward_horizon=10)
    module.sum_over_ranks = lambda values: values
    every = range(5)
    experience.store("old_logprobs", every, torch.full((5, 3), -1.0))
    experience.store("ref_logprobs", every, torch.full((5, 3), -1.4))

    rewards = module.token_rewards(experience)

    torch.testing.assert_close(rewards[2], torch.tensor([-0.2, -0.2, 0.3]))
    torch.testing.assert_close(rewards[1], torch.tensor([-0.2, 0.0, 0.0]))
    # KL 0.4 is above the target: up by a fifth of n / horizon, five sequences of ten.
    assert module.kl_controller.kl_coef == pytest.approx(0.5 * 1.1)
    assert module.metrics.compute()["actor/reward_kl_penalty"] == pytest.approx(0.4)


def test_gdpo_compares_every_reward_by_itself(experience):
    module = GDPO("unused", reward_weights={"reward": 1.0, "short": 0.5})
    module.sum_over_ranks = lambda values: values
    for trajectory in experience.trajectories:
        trajectory.reward_parts["short"] = 100.0 * (len(trajectory.response_ids) == 1)

    advantages = module.compute_advantages(experience)

    # Group a: rewards (1, -1, 0) in spreads of 0.5, form (-1, 2, -1) / 3 * 100 in spreads of 100 / sqrt(3). Group b:
    # rewards equal, form (1, -1) / sqrt(2) in spreads.
    form = torch.tensor([-1, 2, -1]) / 3 * 3**0.5
    total = torch.cat([torch.tensor([1.0, -1.0, 0.0]) + 0.5 * form, torch.tensor([0.5, -0.5]) / 2**0.5])
    tokens = total.repeat_interleave(torch.tensor(LENGTHS))
    torch.testing.assert_close(advantages, (total - tokens.mean()) / tokens.std(), atol=1e-5, rtol=1e-4)


def test_gdpo_names_a_reward_that_is_missing(experience):
    module = GDPO("unused", reward_weights={"acc": 1.0})
    module.sum_over_ranks = lambda values: values
    experience.trajectories[0].reward_parts["acc"] = 1.0

    with pytest.raises(
        ValueError, match=r"reward_weights names 'acc', which 4 of 5 trajectories .* There are \['acc'\]"
    ):
        module.compute_advantages(experience)
    with pytest.raises(ValueError, match=r"model\.reward_weights=None: GDPO needs a weight by name"):
        GDPO("unused")
    with pytest.raises(ValueError, match=r"model\.reward_weights\.acc=nan must be finite"):
        GDPO("unused", reward_weights={"acc": float("nan")})


@pytest.fixture
def conversations(make_experience):
    """Two turns of 2 and 1 tokens around a tool's answer, twice, and one turn of a third trajectory."""
    masks = [[1, 1, 0, 1], [1, 1, 0, 1], [1]]
    trajectories = [
        Trajectory(
            row_id="a", group_id="a", prompt_ids=[5], response_ids=[7] * len(mask), loss_mask=mask,
            rollout_logprobs=[-1.0 * m for m in mask], policy_versions=[m - 1 for m in mask], reward=reward,
            turn_rewards=earned,
        )
        for mask, reward, earned in zip(masks, [1.0, 0.5, 0.0], [[0.25], [0.5], []], strict=True)
    ]  # fmt: skip
    return make_experience(trajectories)


def test_turn_grpo_judges_each_turn_against_the_same_turn_of_the_others(conversations):
    module = TurnGRPO("unused", gamma=0.5, normalize_std=False)
    module.sum_over_ranks = lambda values: values

    advantages = module.compute_advantages(conversations)

    # Last turns earn 0.75, 0 and 0; returns of the first turns are 0.25 + 0.375, 0.5 and 0, with mean 0.375.
    expected = [[0.25, 0.25, 0.0, 0.375], [0.125, 0.125, 0.0, -0.375], [-0.375, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_turn_grpo_with_one_turn_is_grpo(experience):
    module = TurnGRPO("unused", gamma=0.3)
    module.sum_over_ranks = lambda values: values

    advantages = module.compute_advantages(experience)

    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0)


def test_the_optimal_token_baseline_is_the_energy_weighted_mean_return(experience):
    module = OptimalTokenBaseline("unused", gamma=0.5)
    module.sum_over_ranks = lambda values: values
    # Energies 1 - 2 e^-1 + s of the tokens: e with s = 2 e^-1 - 0.5, and twice that in the first trajectory.
    squares = torch.full((5, 3), 2 / 2.718281828 - 0.5)
    squares[0] += 0.5
    experience.store("sum_pi_squared", range(5), squares)

    advantages = module.compute_advantages(experience)

    # Returns of group a: (0.5, 1), (0), (0.125, 0.25, 0.5). Running energies at step 0: 1, 0.5, 0.5; at step 1 the
    # first and third have 2 and 1. The third token of the third trajectory is alone.
    first, second = (0.5 + 0.0 + 0.0625) / 2, (2 * 1.0 + 0.25) / 3
    expected = [[0.5 - first, 1 - second, 0], [-first, 0, 0], [0.125 - first, 0.25 - second, 0.5]]
    torch.testing.assert_close(advantages[:3], torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GDPO("unused", reward_weights={"reward": 1.0, "short": 0.5}),
        lambda: TurnGRPO("unused", gamma=0.5),
        lambda: OptimalTokenBaseline("unused"),
        lambda: ReinforcePlusPlus("unused", gamma=0.9),
    ],
    ids=["gdpo", "turn_grpo", "optimal_token_baseline", "reinforce_plus_plus"],
)
def test_advantages_do_not_depend_on_which_rank_holds_a_trajectory(make, make_experience, make_trajectories):
    trajectories = make_trajectories(num_groups=3)
    for number, trajectory in enumerate(trajectories):
        trajectory.reward_parts["short"] = float(number % 3)
    whole = make_experience(trajectories)
    squares = torch.rand(len(trajectories), 14, generator=torch.Generator().manual_seed(0))
    whole.store("sum_pi_squared", range(len(trajectories)), squares)
    alone = make()
    alone.sum_over_ranks = lambda values: values
    expected = alone.compute_advantages(whole)

    shares = [[0, 3, 4, 9, 10], [i for i in range(len(trajectories)) if i not in (0, 3, 4, 9, 10)]]
    barrier, sent, got = threading.Barrier(2, timeout=30), {}, {}

    def rank(number):
        def sum_over_ranks(values):
            sent[number] = values
            barrier.wait()
            total = sent[0] + sent[1]
            barrier.wait()
            return total

        share = Experience(
            iteration=0, temperature=1.0, plan=whole.plan, trajectories=[trajectories[i] for i in shares[number]],
            indices=shares[number], rewards=whole.rewards, group_ids=whole.group_ids, loss_tokens=whole.loss_tokens,
        )  # fmt: skip
        share.store("sum_pi_squared", range(len(share)), squares[shares[number]])
        module = make()
        module.sum_over_ranks = sum_over_ranks
        got[number] = module.compute_advantages(share)

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)

    for number, indices in enumerate(shares):
        if expected.dim() == 1:
            torch.testing.assert_close(got[number], expected)
        else:
            columns = got[number].shape[1]
            torch.testing.assert_close(got[number], expected[indices, :columns])
            assert not expected[indices, columns:].any()


# O23 (a)
@pytest.mark.parametrize(
    "name",
    [
        "GRPO",
        "RLOO",
        "OPO",
        "GPG",
        "MaxRL",
        "PassAtK",
        "ReinforcePlusPlusBaseline",
        "GSPO",
        "DRO",
        "LitePPO",
        "TurnGRPO",
    ],
)
def test_a_group_baseline_warns_of_groups_of_one(name, caplog):
    assert f"data.group_size=1: every advantage is 0 and the policy learns nothing from its rewards, since {name}" in (
        warnings_at_start(getattr(modules, name)("unused"), caplog)
    )


@pytest.mark.parametrize("name", ["PPO", "ReinforcePlusPlus", "ReMax"])
def test_methods_without_a_group_take_groups_of_one(name, caplog):
    assert warnings_at_start(getattr(modules, name)("unused"), caplog) == ""


def warnings_at_start(module, caplog):
    module.trainer = SimpleNamespace(current_epoch=0, datamodule=SimpleNamespace(group_size=1), strategy=None)
    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        module.setup("fit")
    return caplog.text


def test_remax_asks_for_greedy_rollouts():
    with pytest.raises(ValueError, match=r"data\.greedy_baseline=False: ReMax needs .* Set data\.greedy_baseline=true"):
        ReMax("unused").check_data(SimpleNamespace(group_size=4, greedy_baseline=False))


def test_dr_grpo_names_the_length_it_divides_by():
    with pytest.raises(ValueError, match=r"model\.loss_scale=0 must be above 0"):
        DrGRPO("unused", loss_scale=0)
