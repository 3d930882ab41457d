"""Every strategy, in every layout: the same gradients, norms and parameters as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.case import Recipe
from parity.cases import USER_CASES, gpt2, llama
from parity.pairs import a_third_compiled, covering_rows, in_turns
from parity.parity import check_parity
from parity.rows import name_of, plan_of
from plait.engine.sharding import reducer
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.plan.plan import Plan

FACTORS = {
    "strategy": ("none", "optimizer", "gradients", "full"),
    "offload": ("none", "parameters", "full"),
    "data": ((2, 1), (3, 1), (4, 1), (4, 2)),
    "model": ((1, 1), (2, 1), (1, 2)),
    "reduce": ("last", "each"),
    "optimizer": ("adamw", "sgd"),
}
"""`data`: dp and replicate; `model`: pp and tp."""
SCHEDULES = {"last": "1f1b", "each": "zb-h1"}


def allowed(row: dict[str, Any]) -> bool:
    return row.get("strategy") != "none" or row.get("offload", "none") == "none"


def check(thread_ranks: Any, row: dict[str, Any], steps: int) -> None:
    of_plan = {name: value for name, value in row.items() if name != "optimizer"}
    plan = plan_of(of_plan, schedule=SCHEDULES[row["reduce"]], microbatches=3)
    case = llama() if plan.tp > 1 else gpt2()
    check_parity(thread_ranks, case, plan, Recipe(steps, optimizer=row["optimizer"]))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_sharded_runs_equal_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, steps=2)


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(covering_rows(FACTORS, allowed, strength=3)), ids=name_of)
def test_sharded_runs_equal_one_rank_for_every_triple_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, steps=3)


@pytest.mark.parametrize(
    ("case", "reduce"), in_turns({case.name: case for case in USER_CASES}, {"last": "last", "each": "each"})
)
def test_users_models_fully_sharded_over_three_ranks_equal_one_rank(
    thread_ranks: Any, case: Any, reduce: Any
) -> None:
    """Frozen and unused parameters, ties, several dtypes, layers in place, more ranks than rows."""
    plan = Plan(dp=3, strategy="full", reduce=reduce, microbatches=2, precision="fp64")
    check_parity(thread_ranks, case, plan)


OFFLOADED = {
    "gradients": {"dp": 2, "strategy": "gradients", "reduce": "each"},
    "in copies": {"pp": 2, "dp": 4, "replicate": 2, "strategy": "full", "schedule": "zb-v"},
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_gradients_that_are_copied_late_equal_those_of_one_rank(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As from a GPU: added when the next unit's are copied, and the memory that they came from is reused."""

    def read_later(summed: Tensor) -> Any:
        arrived = summed.clone()
        summed.fill_(torch.nan)
        return lambda: arrived

    monkeypatch.setattr(FlatBuffer, "offloads_gradients", property(lambda self: self.spec.shard_gradient))
    monkeypatch.setattr(reducer, "read_later", read_later)
    plan = Plan(**OFFLOADED[name], offload="full", microbatches=4, precision="fp64")
    check_parity(thread_ranks, gpt2(layers=4), plan, Recipe(steps=2))
