"""A unit that is sharded over other axes than its neighbours: `resolve_units` says so, all else follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.case import Batch, Case
from parity.live_bytes import LiveBytes
from parity.pairs import in_quick
from parity.parity import check_parity
from parity.resumed_steps import in_a_rank
from plait.engine import blueprint
from plait.errors import PlanError
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.plan import rules
from plait.plan.layout import Flat
from plait.plan.parameter_units import BufferKind, UnitSpec, resolve_units
from plait.plan.plan import Plan

TOY = "1"
"""The unit that is sharded over `shard` and `tp`."""
LENGTH, WIDTH = 6, 8
PLANS: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "each": {"strategy": "full", "reduce": "each", "microbatches": 2},
    "hybrid": {"strategy": "gradients", "dp": 4, "replicate": 2},
    "optimizer": {"strategy": "optimizer", "pp": 2, "microbatches": 2},
    "context": {"strategy": "full", "cp": 2},
}


def plan_of(**options: Any) -> Plan:
    return Plan(**{"dp": 2, "tp": 2, "sequence_parallel": "keep", "precision": "fp64"} | options)


def build() -> nn.Module:
    """Three linears that work on each position by itself: ranks of `tp` have summands of their gradients."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(3)))
    model.rules = dict.fromkeys("012", rules.sequence)  # type: ignore[assignment]
    return model


def draw(rows: int, generator: torch.Generator) -> Batch:
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(WIDTH, (rows, LENGTH), generator=generator)


CASE = Case("toy", build, draw)


def over_tp(kind: BufferKind) -> BufferKind:
    if not kind.sharded:
        return kind
    return replace(kind, sharded_over=("shard", "tp"), reduced_over=("replicate", "cp"))


def resolved(*given: Any) -> dict[str, UnitSpec]:
    """As plait resolves them, but for one unit."""
    units = resolve_units(*given)
    toy = units[TOY]
    return units | {TOY: replace(toy, kinds={name: over_tp(kind) for name, kind in toy.kinds.items()})}


@pytest.fixture(autouse=True)
def toy_unit() -> Any:
    with patch.object(blueprint, "resolve_units", resolved):
        yield


@pytest.mark.parametrize("name", PLANS)
def test_a_unit_sharded_over_shard_and_tp_trains_as_on_one_rank(thread_ranks: Any, name: str) -> None:
    check_parity(thread_ranks, CASE, plan_of(**PLANS[name]))


def test_only_that_unit_is_cut_over_shard_and_tp() -> None:
    made = blueprint.build_blueprint(build(), plan_of(**PLANS["full"]))
    toy, neighbour = made.layouts["1.weight"], made.layouts["0.weight"]
    where = {"replicate": 0, "shard": 1, "cp": 0, "tp": 1}
    assert [axis for axis, one in toy.axis_placements.items() if isinstance(one, Flat)] == ["shard", "tp"]
    assert (len(toy.replicas(where)), len(neighbour.replicas(where))) == (1, 2)


def test_equal_gradients_are_not_added_over_tp() -> None:
    """Without sequence parallelism each rank of `tp` computes all of the gradient, not a summand."""
    plan = plan_of(strategy="full", sequence_parallel="none")
    with pytest.raises(PlanError, match=r"1.weight has the same gradient on several ranks of tp, which"):
        _ = blueprint.build_blueprint(build(), plan).buffer_specs


def test_a_checkpoint_of_it_is_loaded_under_other_plans(thread_ranks: Any, tmp_path: Path) -> None:
    plan = plan_of(**PLANS["full"])
    alone = in_a_rank(CASE, Plan(precision="fp64"), None, None, range(4))
    first = thread_ranks.run(in_a_rank, CASE, plan, None, tmp_path / "half", range(2), ranks=4)
    others = {plan: 4, Plan(precision="fp64"): 1, plan_of(dp=1, strategy="none"): 2}
    for other, ranks in others.items():
        last = thread_ranks.run(in_a_rank, CASE, other, tmp_path / "half", None, range(2, 4), ranks=ranks)
        assert first[0] + last[0] == pytest.approx(alone, rel=1e-12)


def counted(plan: Plan) -> int:
    """The most bytes that are alive after an instruction of a rank's second step."""
    live = LiveBytes()
    with live, patch.object(blueprint, "resolve_units", resolved):
        engine = plait.parallelize(build(), plan, plait.Mesh(plan), CASE.loss, seed=3)
        for unit in engine.runtime.units.values():
            for buffer in unit.trainable:
                live.own(buffer.gradient)
        optimizer = torch.optim.AdamW(engine.parameters())
        inputs, targets = large_batch()
        engine.forward_backward(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        alive: list[int] = []
        engine.observe(lambda instruction, _: alive.append(live.count()))
        engine.forward_backward(inputs, targets)
        return max(alive)


def large_batch() -> tuple[Tensor, Tensor]:
    return draw(256, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", in_quick(("full", "hybrid"), "full"))
def test_verify_finds_it_right(name: str) -> None:
    model = build().to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(number))
    inputs, targets = draw(8, torch.Generator().manual_seed(0))
    plan = replace(plan_of(**PLANS[name]), precision=None)
    report = plait.verify(model.float(), plan, inputs.float(), targets, ranks_as="threads")
    assert report.equal, report


def test_its_memory_is_predicted_within_one_percent(rank_pool: Any) -> None:
    plan = plan_of(**PLANS["full"])
    found = rank_pool.run(counted, plan, ranks=4)
    inputs, targets = large_batch()
    estimator = MemoryEstimator(build(), inputs, targets, loss=CASE.loss, moments=2, device="cpu")
    (foreseen,) = estimator.ranks(plan)
    assert foreseen.peak == pytest.approx(found[0], rel=0.01)
