"""The routes of parts of parameters: from the shards on all ranks to each part's owner, and back.

    routes_to_owners      each element once, from one of the ranks that hold it, unless the owner does
    routes_from_owners    each element to every rank that holds it, but the owner

Both are decided without communication, alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.optimizers.owners import HeldShard, OwnedPart
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import ShardBox, intersection


@dataclass(frozen=True)
class Route:
    """A box of a part that one rank sends to another."""

    part: int
    """Its number."""
    box: Box
    """In the global tensor of the part's parameter."""
    shard_box: ShardBox
    """The box of the shard in which it lies, at the end of the route that is not the owner."""
    sender: int
    receiver: int

    @property
    def order(self) -> tuple[int, int, int, tuple[int, ...]]:
        """The key by which sender and receiver sort what they exchange."""
        return self.sender, self.receiver, self.part, self.box.offsets


@dataclass(frozen=True)
class OwnBox:
    """A box of a part that its owner holds itself: it is copied, and not sent."""

    part: int
    box: Box
    shard_box: ShardBox


def routes_to_owners(parts: Sequence[OwnedPart], held: Mapping[str, Sequence[HeldShard]]) -> list[Route]:
    """Return the routes by which each part's owner gets what it does not hold, in order.

    Of the ranks that hold a box the one sends it that has sent the fewest elements so far.
    """
    sent: dict[int, int] = {}
    routes: list[Route] = []
    for part in parts:
        for shard in held[part.parameter]:
            if part.owner in shard.ranks or not (elements := shard.elements_in(part.box)):
                continue
            sender = min(shard.ranks, key=lambda rank: (sent.get(rank, 0), rank))
            sent[sender] = sent.get(sender, 0) + elements
            routes.extend(
                Route(part.number, box, one, sender, part.owner) for box, one in _boxes_in(part.box, shard)
            )
    return sorted(routes, key=lambda route: route.order)


def routes_from_owners(parts: Sequence[OwnedPart], held: Mapping[str, Sequence[HeldShard]]) -> list[Route]:
    """Return the routes by which each rank gets its shard of each part from the part's owner, in order."""
    routes = [
        Route(part.number, box, one, part.owner, rank)
        for part in parts
        for shard in held[part.parameter]
        for box, one in _boxes_in(part.box, shard)
        for rank in shard.ranks
        if rank != part.owner
    ]
    return sorted(routes, key=lambda route: route.order)


def own_boxes(parts: Sequence[OwnedPart], held: Mapping[str, Sequence[HeldShard]], rank: int) -> list[OwnBox]:
    """Return the boxes of the parts that `rank` owns, of which it holds the shard."""
    return [
        OwnBox(part.number, box, one)
        for part in parts
        if part.owner == rank
        for shard in held[part.parameter]
        if rank in shard.ranks
        for box, one in _boxes_in(part.box, shard)
    ]


def most_sent(routes: Iterable[Route]) -> int:
    """Return the number of elements that the rank sends which sends most."""
    sent: dict[int, int] = {}
    for route in routes:
        sent[route.sender] = sent.get(route.sender, 0) + route.box.numel
    return max(sent.values(), default=0)


def _boxes_in(box: Box, shard: HeldShard) -> Iterator[tuple[Box, ShardBox]]:
    """Yield the boxes that `box` and a shard have in common, each with the box of the shard it lies in."""
    for one in shard.boxes:
        common = intersection(box, one.box)
        if common.numel:
            yield common, one
