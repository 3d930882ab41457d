"""Which optimizers may update pieces, and what happens to the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from parity.case import SEED
from parity.cases import gpt2
from plait.errors import PlanError
from plait.plan import Plan


def step_by(plan: Plan, kind: str, groups: bool) -> str:
    """A step, if the optimizer is let."""
    case = gpt2()
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    (batch,) = case.batches(2, 1, torch.float32)
    parameters: Any = engine.parameters()
    if groups:
        parameters = engine.parameter_groups(weight_decay=0.0)
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    engine.forward_backward(*batch)
    try:
        optimizer.step()
    except PlanError as refused:
        assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
        return str(refused)
    return ""


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("plan", [Plan(dp=2, strategy="full"), Plan(tp=2)], ids=["full", "tp"])
def test_elementwise_ones_work(rank_pool: Any, plan: Plan, kind: str) -> None:
    assert rank_pool.run(step_by, plan, kind, True, ranks=2) == ["", ""]


@pytest.mark.parametrize("plan", [Plan(dp=2, strategy="full"), Plan(tp=2)], ids=["full", "tp"])
def test_others_are_refused_before_they_change_anything(rank_pool: Any, plan: Plan) -> None:
    for told in rank_pool.run(step_by, plan, "Adafactor", False, ranks=2):
        assert told.startswith("Adafactor divides an element by the mean squares of its row and its column")


def test_where_nothing_is_cut_all_are_let(rank_pool: Any) -> None:
    assert rank_pool.run(step_by, Plan(dp=2), "Adafactor", False, ranks=2) == ["", ""]
