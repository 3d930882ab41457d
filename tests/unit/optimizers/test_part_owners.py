"""Owners of parts: equally loaded, the same on all ranks, and the bytes that parts cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pytest

import plait
from parity.pairs import in_quick
from plait.engine.blueprint import Blueprint, build_blueprint
from plait.optimizers.hidden_matrices import parameter_matrices
from plait.optimizers.part_exchange import transfers_from_owners, transfers_to_owners
from plait.optimizers.part_owners import (
    OwnedPart,
    ParameterPart,
    assign_owners,
    boxes_within,
    held_boxes,
)
from plait.plan.axes import sizes_of_plan
from plait.plan.layout.layout import Box
from plait.plan.layout.routes import RankBoxes
from plait.plan.plan import Plan


def blueprint_of(plan: Plan, layers: int, hidden: int = 64) -> Blueprint:
    model = plait.models.gpt2(layers=layers, hidden=hidden, heads=4, vocab=50, context=8)
    return build_blueprint(model, plan)


def muon_parts(blueprint: Blueprint) -> list[ParameterPart]:
    found = parameter_matrices(blueprint.sequence, blueprint.rules)
    return [ParameterPart(name, part.box, part.cost) for name, one in found.items() for part in one.parts]


def owned(plan: Plan, layers: int) -> tuple[tuple[OwnedPart, ...], Mapping[str, RankBoxes]]:
    blueprint = blueprint_of(plan, layers)
    parts = muon_parts(blueprint)
    held = held_boxes(blueprint.shard_plan, sizes_of_plan(plan), {part.parameter for part in parts})
    return assign_owners(parts, held), held


PLANS = {
    "full": Plan(dp=8, strategy="full"),
    "optimizer": Plan(dp=8, strategy="optimizer"),
    "copies": Plan(dp=8, replicate=2, strategy="full"),
    "none": Plan(dp=8),
    "tp": Plan(dp=4, tp=2, strategy="full"),
    "pp": Plan(pp=2, dp=4, strategy="full", microbatches=2),
    "cp": Plan(dp=2, cp=2, tp=2),
}


@pytest.mark.parametrize("name", in_quick(PLANS, "full", "tp", "pp"))
def test_ranks_share_the_operations_of_24_blocks_to_within_5_percent(name: str) -> None:
    """Eight ranks, or with stages the four of each, which have their own blocks."""
    parts, _ = owned(PLANS[name], layers=24)
    loads = [sum(part.cost for part in parts if part.owner == rank) for rank in range(8)]
    assert sum(loads) == sum(part.cost for part in parts)
    size = 8 // PLANS[name].pp
    for stage in (loads[first : first + size] for first in range(0, 8, size)):
        assert 0 < max(stage) <= 1.05 * sum(stage) / size


@pytest.mark.parametrize("name", PLANS)
def test_owners_hold_a_shard_or_a_copy_of_the_parameter(name: str) -> None:
    parts, held = owned(PLANS[name], layers=3)
    assert all(part.owner in held[part.parameter] for part in parts)


def test_of_equally_loaded_ranks_one_that_holds_the_part_owns_it() -> None:
    rows = {rank: (Box((2 * rank, 0), (2, 4)),) for rank in range(4)}
    parts = [ParameterPart("weight", Box((4, 0), (2, 4)), 1), ParameterPart("weight", Box((0, 0), (2, 4)), 1)]
    assert [part.owner for part in assign_owners(parts, {"weight": rows})] == [2, 0]


def test_the_most_expensive_part_is_given_away_first() -> None:
    copies = {rank: (Box((0,), (6,)),) for rank in range(2)}
    costs = [1, 1, 1, 3]
    parts = [ParameterPart("weight", Box((number,), (1,)), cost) for number, cost in enumerate(costs)]
    assert [part.owner for part in assign_owners(parts, {"weight": copies})] == [1, 1, 1, 0]


@pytest.mark.parametrize("name", PLANS)
def test_owners_get_each_element_once_and_give_it_to_each_rank_that_holds_it(name: str) -> None:
    """Without routes: 2 · Σ (n − the owner's own) elements, and on the way back all further copies."""
    parts, held = owned(PLANS[name], layers=2)
    there = [one for one in transfers_to_owners(parts, held) if not one.is_local]
    back = [one for one in transfers_from_owners(parts, held) if not one.is_local]
    missing, copies = 0, 0
    for part in parts:
        counts = {
            rank: sum(box.numel for box in boxes)
            for rank, boxes in boxes_within(part.box, held[part.parameter]).items()
        }
        missing += prod(part.box.sizes) - counts[part.owner]
        copies += sum(counts.values()) - counts[part.owner]
    assert sum(one.box.numel for one in there) == missing
    assert sum(one.box.numel for one in back) == copies
    if name in ("full", "optimizer"):
        assert copies == missing > 0
    if name == "none":
        assert missing == 0
        assert copies == 7 * sum(prod(part.box.sizes) for part in parts)
