"""Accumulating the numbers of an iteration's updates."""

from __future__ import annotations

import math

import pytest
import torch

from lit_rl.metrics.policy import PolicyMetrics


def test_means_weigh_by_tokens_and_not_by_micro_batch() -> None:
    metrics = PolicyMetrics()
    metrics.mean("entropy", torch.tensor(1.0), torch.tensor(4))
    metrics.mean("entropy", torch.tensor(3.0), torch.tensor(1))
    metrics.mean("loss", 0.5)
    metrics.mean("loss", torch.tensor(1.5))

    assert metrics.compute() == {"entropy": 1.4, "loss": 1.0}


def test_a_mean_does_not_depend_on_how_tokens_were_split() -> None:
    values = torch.randn(60, generator=torch.Generator().manual_seed(0))
    whole, split = PolicyMetrics(), PolicyMetrics()
    whole.mean("x", values.mean(), 60)
    for part in values.split([1, 20, 39]):
        split.mean("x", part.mean(), len(part))

    assert split.compute()["x"] == pytest.approx(whole.compute()["x"], rel=1e-6)


@pytest.mark.parametrize("value", [5.0, math.nan, math.inf])
def test_weight_0_adds_nothing(value: float) -> None:
    metrics = PolicyMetrics()
    metrics.mean("only weightless", torch.tensor(value), torch.tensor(0))
    metrics.mean("x", value, 0)
    metrics.mean("x", 2.0, 3)

    assert metrics.compute() == {"x": 2.0}


def test_maxima_keep_the_largest_and_counts_add_up() -> None:
    metrics = PolicyMetrics()
    for value in (-3.0, torch.tensor(-1.0), -2.0):
        metrics.maximum("gap", value)
    for amount in (1.0, 0.0, 1.0):
        metrics.count("skipped", amount)
    metrics.count("none", 0.0)

    assert metrics.compute() == {"gap": -1.0, "skipped": 2.0, "none": 0.0}


def test_computing_starts_anew() -> None:
    metrics = PolicyMetrics()
    for value in (1.0, 3.0):
        metrics.mean("m", value)
        metrics.maximum("x", value)
        metrics.count("c")
        assert metrics.compute() == {"m": value, "x": value, "c": 1.0}
    assert metrics.compute() == {}


@pytest.mark.parametrize(
    ("value", "weight"),
    [(torch.ones((), device="meta"), 2.0), (2.0, torch.ones((), device="meta")), (torch.ones((), device="meta"),) * 2],
)
def test_numbers_stay_on_their_device_until_they_are_asked_for(
    value: torch.Tensor | float, weight: torch.Tensor | float
) -> None:
    metrics = PolicyMetrics()
    for _ in range(2):
        metrics.mean("x", value, weight)
        metrics.maximum("y", torch.ones((), device="meta"))

    assert metrics._sums["x"].device.type == metrics._weights["x"].device.type == "meta"
    assert metrics._maxima["y"].device.type == "meta"


def test_no_graph_is_kept() -> None:
    metrics = PolicyMetrics()
    metrics.mean("loss", torch.ones((), requires_grad=True) * 2)
    metrics.maximum("norm", torch.ones((), requires_grad=True) * 2)

    assert not metrics._sums["loss"].requires_grad
    assert not metrics._maxima["norm"].requires_grad


def test_means_are_over_all_ranks_and_counts_are_of_what_they_do_together() -> None:
    ranks = [PolicyMetrics(), PolicyMetrics()]
    for rank, (value, weight) in zip(ranks, ((1.0, 3.0), (5.0, 1.0)), strict=True):
        rank.mean("entropy", value, weight)
        rank.maximum("gap", value)
        rank.count("skipped")
    ranks[1].mean("only here", 2.0)
    reports: list = []
    ranks[0].compute(lambda own: reports.append(own) or [own])

    assert ranks[1].compute(lambda own: [*reports, own]) == {
        "entropy": 2.0,  # (3 x 1 + 1 x 5) / 4
        "only here": 2.0,
        "gap": 5.0,
        "skipped": 1.0,
    }
