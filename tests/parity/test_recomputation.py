"""Recomputed activations on real ranks: users' models, the same bits as without, and per layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity import woven
from parity.case import Recipe
from parity.cases import USER_CASES, gpt2, llama
from parity.parity import check_parity
from plait.plan import Plan, Recompute


@pytest.mark.parametrize("case", USER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_users_models(rank_pool: Any, case: Any, recompute: Recompute) -> None:
    plan = Plan(pp=2, schedule="zb-h1", microbatches=2, recompute=recompute, precision="fp64")
    check_parity(rank_pool, case, plan)


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2, "schedule": "zb-v", "dp": 2, "strategy": "full"},
        {"pp": 2, "tp": 2},
        {"dp": 2, "strategy": "gradients", "reduce": "each"},
    ],
    ids=str,
)
def test_the_same_bits(rank_pool: Any, settings: dict[str, Any]) -> None:
    case = (llama if "tp" in settings else gpt2)(layers=2)
    runs = []
    for recompute in ("none", "selective", "full"):
        plan = Plan(**settings, microbatches=4, precision="fp64", recompute=recompute)
        runs.append(rank_pool.run(woven.train, case, plan, Recipe(steps=2), ranks=plan.world))
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert first.losses == other.losses
            assert all(torch.equal(first.gradients[name], other.gradients[name]) for name in first.gradients)


def test_each_layer_as_it_is_told(rank_pool: Any) -> None:
    case = gpt2(layers=2)
    modes: tuple[Recompute, ...] = ("none", "full", "selective", "full", "selective", "none")
    plan = Plan(pp=2, microbatches=3, recompute=modes, precision="fp64")
    assert len(modes) == woven.layer_count(case)
    check_parity(rank_pool, case, plan)


def test_eight_ranks(rank_pool: Any) -> None:
    plan = Plan(
        pp=2,
        tp=2,
        dp=2,
        schedule="zb-v",
        microbatches=3,
        strategy="full",
        reduce="each",
        recompute="full",
        precision="fp64",
    )
    check_parity(rank_pool, llama(layers=2), plan)
