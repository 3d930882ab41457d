"""Which rank owns which part of a parameter: it gets that part whole, and works on it for all ranks.

    parts of all parameters,  ┐
    each with its cost        ├─ assign_owners ─ the rank that owns each part
    who holds which shard     ┘

The most expensive part comes first, and goes to the rank with the least to do, of those that hold a shard or
a copy of its parameter. Every rank decides for all parts, and so they agree without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.plan.axes import rank_at
from plait.plan.layout.layout import Box, Coordinate, Layout
from plait.plan.layout.shards import ShardBox, intersection, shard_boxes
from plait.plan.shard_plan import ShardPlan


@dataclass(frozen=True)
class HeldShard:
    """A shard of a parameter, and the ranks that hold a copy of it."""

    boxes: tuple[ShardBox, ...]
    ranks: tuple[int, ...]

    def elements_in(self, box: Box) -> int:
        """Return how many elements of `box` the shard has."""
        return sum(intersection(one.box, box).numel for one in self.boxes)


@dataclass(frozen=True)
class ParameterPart:
    """A box of a parameter that one rank needs whole, and what its work on it costs."""

    parameter: str
    box: Box
    cost: int


@dataclass(frozen=True)
class OwnedPart:
    """A box of a parameter, and the rank that owns it: the one that gets it whole."""

    number: int
    """Among all parts of the model."""
    parameter: str
    box: Box
    cost: int
    owner: int


def held_shards(
    shard_plan: ShardPlan, sizes: Mapping[str, int], names: Iterable[str]
) -> dict[str, tuple[HeldShard, ...]]:
    """Return for each parameter its different shards, which together are all of it, with their ranks.

    `sizes`: the number of ranks along each axis of the mesh.
    """
    known: dict[tuple[Layout, tuple[int, ...]], tuple[HeldShard, ...]] = {}
    found = {}
    for name in names:
        key = shard_plan.layouts[name], shard_plan.owners[name]
        if key not in known:
            known[key] = tuple(_held(*key, sizes))
        found[name] = known[key]
    return found


def _held(layout: Layout, stages: Sequence[int], sizes: Mapping[str, int]) -> Iterator[HeldShard]:
    ranks: dict[Coordinate, list[int]] = {}
    for stage in stages:
        for where in layout.coordinates():
            place = dict(zip(layout.axes, where, strict=True))
            ranks.setdefault(layout.owner(where), []).append(rank_at({"pp": stage, **place}, sizes))
    for where, copies in ranks.items():
        yield HeldShard(shard_boxes(layout, where), tuple(sorted(copies)))


def assign_owners(
    parts: Sequence[ParameterPart], held: Mapping[str, Sequence[HeldShard]]
) -> tuple[OwnedPart, ...]:
    """Return `parts` with owners: each goes to the least loaded rank that holds a shard of its parameter.

    Of equally loaded ranks to the one that holds most of the part. `held`: the shards of each parameter.
    """
    loads: dict[int, int] = {}
    owners: dict[int, int] = {}
    for number in sorted(range(len(parts)), key=lambda number: -parts[number].cost):
        part, elements = parts[number], dict[int, int]()
        for shard in held[part.parameter]:
            elements |= dict.fromkeys(shard.ranks, shard.elements_in(part.box))
        owner = min(elements, key=lambda rank: (loads.get(rank, 0), -elements[rank], rank))
        loads[owner] = loads.get(owner, 0) + part.cost
        owners[number] = owner
    return tuple(
        OwnedPart(number, part.parameter, part.box, part.cost, owners[number])
        for number, part in enumerate(parts)
    )
