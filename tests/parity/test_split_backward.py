"""Modules with a backward split by the user: gradients of one rank, and each part called once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity import data, woven
from parity.case import Recipe
from parity.cases import case
from parity.layers import HIDDEN
from parity.parity import check_parity
from parity.splitting import CALLS, Scale, split_entrance, split_modules
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.schedules.action import Kind
from plait.schedules.lowering.program import RunLayer

SPLIT = case(split_modules, data.draw_vectors)
PLANS = [
    Plan(pp=2, dp=2, microbatches=4, schedule="zb-h1", strategy="full"),
    Plan(pp=2, dp=2, microbatches=2, strategy="gradients", reduce="each", recompute="full"),
    Plan(pp=2, microbatches=3, schedule="zb-v", recompute="selective"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule}-{plan.strategy}-{plan.recompute}")
def test_a_module_with_a_split_backward_has_the_gradients_of_one_rank(
    thread_ranks: RankPool, plan: Plan
) -> None:
    check_parity(thread_ranks, SPLIT, replace(plan, precision="fp64"), Recipe(steps=2))


def test_an_entrance_may_split_its_backward(thread_ranks: RankPool) -> None:
    plan = Plan(tp=2, dp=2, microbatches=2, strategy="full", precision="fp64")
    check_parity(thread_ranks, case(split_entrance, data.draw_vectors), plan, Recipe(steps=1))


COUNTED = case(
    lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Scale(HIDDEN)), data.draw_vectors, name="counted"
)


def calls_in_a_rank(plan: Plan) -> list[tuple[str, dict[str, int]]]:
    """Which parts were called during each action of the stage that has the module."""
    engine = woven.weave(COUNTED, plan)
    found: list[tuple[str, dict[str, int]]] = []

    def note(instruction: Any, parts: Any) -> None:
        if isinstance(instruction, RunLayer):
            found.append((instruction.action.kind.value, dict(CALLS)))
            CALLS.clear()

    engine.observe(note)
    CALLS.clear()
    engine.forward_backward(*woven.shares(COUNTED, engine, 1)[0])
    return [(kind, calls) for kind, calls in found if calls]


def test_each_part_of_a_split_backward_is_called_once_a_micro_batch_when_it_is_due(
    thread_ranks: RankPool,
) -> None:
    first, second = thread_ranks.run(
        calls_in_a_rank, Plan(pp=2, microbatches=4, schedule="zb-h1", precision="fp64"), ranks=2
    )
    assert first == []
    assert {str(Kind.F.value), str(Kind.I.value), str(Kind.W.value)} == {"F", "I", "W"}
    assert sorted(second, key=str) == sorted([(k, {k: 1}) for k in "FIW" for _ in range(4)], key=str)


def test_verify_finds_a_wrong_part_of_a_split_backward() -> None:
    class Doubled(Scale):
        @staticmethod
        def weight_gradients(gradient: Any, x: Any, note: str) -> dict[str, Any]:
            return {name: 2 * g for name, g in Scale.weight_gradients(gradient, x, note).items()}

    torch.manual_seed(0)
    inputs, targets = torch.randn(4, HIDDEN), torch.tensor([0, 1, 2, 0])
    for kind, equal in ((Scale, True), (Doubled, False)):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), kind(HIDDEN))
        report = plait.verify(model, Plan(microbatches=2), inputs, targets, ranks_as="threads")
        assert bool(report) == equal
    assert "1" in str(report)
