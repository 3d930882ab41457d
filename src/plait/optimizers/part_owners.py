"""Assigns each part of a parameter to an owner: the rank that gets it whole, and works on it for all.

    parts of all parameters,  ┐
    each with its cost        ├─ assign_owners ─ the rank that owns each part
    who holds which shard     ┘

The most expensive part comes first, and goes to the rank with the least to do, of those that hold a shard or
a copy of its parameter. Every rank decides for all parts, and so they agree without communication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.plan.axes import rank_at
from plait.plan.layout.layout import Box, Layout
from plait.plan.layout.routes import RankBoxes, boxes_by_rank
from plait.plan.layout.shards import full_box, intersection
from plait.plan.shard_plan import ShardPlan


@dataclass(frozen=True)
class ParameterPart:
    """A box of a parameter that one rank needs whole, and the cost of that rank's work on it."""

    parameter: str
    box: Box
    cost: int


@dataclass(frozen=True)
class OwnedPart:
    """A box of a parameter, and the rank that owns it, which gets all of it."""

    number: int
    """Among all parts of the model."""
    parameter: str
    box: Box
    cost: int
    owner: int

    @property
    def name(self) -> str:
        """The parameter's name and the part's number, which identify the part in transfers."""
        return f"{self.parameter} {self.number}"


def whole_parts(layouts: Mapping[str, Layout], names: Collection[str]) -> list[ParameterPart]:
    """Return a part for each of the parameters `names` that is all of it; its elements are its cost."""
    boxes = ((name, full_box(one.shape)) for name, one in layouts.items() if name in names)
    return [ParameterPart(name, box, box.numel) for name, box in boxes]


def held_boxes(shard_plan: ShardPlan, sizes: Mapping[str, int], names: Iterable[str]) -> dict[str, RankBoxes]:
    """Return for each parameter the boxes of it that each rank holds, of all ranks that hold a shard.

    `sizes`: the number of ranks along each axis of the mesh.
    """
    known: dict[object, RankBoxes] = {}
    found = {}
    for name in names:
        layout, stages = key = shard_plan.layouts[name], shard_plan.owners[name]
        if key not in known:
            coordinates = [dict(zip(layout.axes, where, strict=True)) for where in layout.coordinates()]
            places = [
                (rank_at({"pp": stage, **where}, sizes), where) for stage in stages for where in coordinates
            ]
            known[key] = boxes_by_rank(layout, places)
        found[name] = known[key]
    return found


def boxes_within(box: Box, held: RankBoxes) -> RankBoxes:
    """Return the boxes of `box` that each rank holds, empty for a rank that holds none of it."""
    common = {rank: [intersection(box, one) for one in boxes] for rank, boxes in held.items()}
    return {rank: tuple(one for one in boxes if one.numel) for rank, boxes in common.items()}


def assign_owners(parts: Sequence[ParameterPart], held: Mapping[str, RankBoxes]) -> tuple[OwnedPart, ...]:
    """Assign each part to the least loaded of the ranks that hold a shard of its parameter; costliest first.

    Of equally loaded ranks to the one that holds most of the part. `held`: who holds what of a parameter.
    """
    loads: dict[int, int] = {}
    owners: dict[int, int] = {}
    known: dict[tuple[Box, int], dict[int, int]] = {}
    for number in sorted(range(len(parts)), key=lambda number: -parts[number].cost):
        part = parts[number]
        key = part.box, id(held[part.parameter])  # parameters of equal layouts share what ranks hold
        if key not in known:
            within = boxes_within(part.box, held[part.parameter])
            known[key] = {rank: sum(box.numel for box in boxes) for rank, boxes in within.items()}
        elements = known[key]
        owner = min(elements, key=lambda rank: (loads.get(rank, 0), -elements[rank], rank))
        loads[owner] = loads.get(owner, 0) + part.cost
        owners[number] = owner
    return tuple(
        OwnedPart(number, part.parameter, part.box, part.cost, owners[number])
        for number, part in enumerate(parts)
    )
