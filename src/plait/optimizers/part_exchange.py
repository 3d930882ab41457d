"""The exchange of parts of parameters between the ranks that hold shards of them and the parts' owners.

    put            a rank's shard goes to the outgoing buffer, or to this rank's own whole parts
    gather         one all-to-all; then `wholes` has the parts that this rank owns
    give_back      one all-to-all; then `pieces_of` has what this rank's shard gets of each part

All parts have one dtype. The buffers are allocated once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from plait.optimizers.owners import HeldShard, OwnedPart
from plait.optimizers.part_routes import (
    Route,
    most_sent,
    own_boxes,
    routes_from_owners,
    routes_to_owners,
)
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import ShardBox, slices_within
from plait.ranks.collectives import all_to_all_uneven
from plait.ranks.group import Group


@dataclass(frozen=True)
class Piece:
    """What a shard of this rank has in common with a part, and the memory where its values are exchanged."""

    part: int
    box: Box
    shard_box: ShardBox
    exchanged: Tensor
    """Of the box's shape: a view of a buffer, or of a whole part that this rank owns."""

    def of(self, shard: Tensor) -> Tensor:
        """Return the view of the contiguous `shard` that holds the piece."""
        return self.shard_box.view_of(shard)[slices_within(self.box, self.shard_box.box)]


@dataclass(frozen=True)
class PackedBoxes:
    """Boxes that this rank sends, or receives, one after another in a flat buffer."""

    routes: Sequence[Route]
    views: Sequence[Tensor]
    """Of the buffer, one for each route, of the box's shape."""
    sizes: Sequence[int]
    """The number of elements for, or from, each rank of the group."""

    @staticmethod
    def of(
        routes: Sequence[Route], others: Sequence[int], ranks: Sequence[int], buffer: Tensor
    ) -> PackedBoxes:
        """Pack `routes` into `buffer`; `others`: the rank at the other end of each, `ranks`: the group's."""
        bounds = accumulate((route.box.numel for route in routes), initial=0)
        views = [
            buffer[start:stop].view(route.box.sizes)
            for route, (start, stop) in zip(routes, pairwise(bounds), strict=True)
        ]
        sizes = dict.fromkeys(ranks, 0)
        for route, other in zip(routes, others, strict=True):
            sizes[other] += route.box.numel
        return PackedBoxes(routes, views, tuple(sizes.values()))

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of this rank's shards, where this rank is not the owner."""
        pairs = zip(self.routes, self.views, strict=True)
        return [Piece(route.part, route.box, route.shard_box, view) for route, view in pairs]


@dataclass(frozen=True)
class AllToAll:
    """One all-to-all: what this rank sends and receives in it, and in which buffers."""

    sent: PackedBoxes
    received: PackedBoxes
    most: int
    """The number of elements that the rank sends which sends most."""
    outgoing: Tensor
    incoming: Tensor

    def run(self, group: Group, about: str) -> None:
        """Send `outgoing` and fill `incoming`; `about` says in errors what is exchanged."""
        outgoing, incoming = self.outgoing[: sum(self.sent.sizes)], self.incoming[: sum(self.received.sizes)]
        sizes = self.sent.sizes, self.received.sizes
        started = all_to_all_uneven(outgoing, group, *sizes, most=self.most, out=incoming, checked=False)
        started.about(about).wait()


class PartExchange:
    """The buffers and routes by which ranks exchange parts of parameters with the parts' owners."""

    def __init__(
        self,
        parts: Sequence[OwnedPart],
        held: Mapping[str, Sequence[HeldShard]],
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts`: those that ranks of `group` own, on all of them alike; `held`: shards of parameters."""
        self.parts, self._group = {part.number: part for part in parts}, group
        owned = [part for part in parts if part.owner == group.rank]
        self.wholes = _whole_parts(owned, dtype, device)
        """The parts that this rank owns, by number."""
        routes = routes_to_owners(parts, held), routes_from_owners(parts, held)
        self._there, self._back = _all_to_alls(routes, group, dtype, device)
        own = [
            Piece(one.part, one.box, one.shard_box, self._in_whole(one.part, one.box))
            for one in own_boxes(parts, held, group.rank)
        ]
        self._put = self._by_parameter([*own, *self._there.sent.pieces])
        self._given_back = self._by_parameter([*own, *self._back.received.pieces])

    def put(self, parameter: str, shard: Tensor) -> None:
        """Copy what owners need of this rank's contiguous `shard` of a parameter to where it is sent from."""
        for piece in self._put.get(parameter, ()):
            piece.exchanged.copy_(piece.of(shard))

    def gather(self) -> None:
        """Send what was `put` to the owners, so that `wholes` has all values of this rank's parts.

        Communication: one all-to-all over the group, of each element that its owner does not hold.
        """
        self._there.run(self._group, "parts for their owners")
        for route, values in zip(self._there.received.routes, self._there.received.views, strict=True):
            self._in_whole(route.part, route.box).copy_(values)

    def give_back(self) -> None:
        """Send the values in `wholes` to all ranks that hold them, so that `pieces_of` has them.

        Communication: one all-to-all over the group, of each element for each rank that holds it, without
        the owner.
        """
        for route, values in zip(self._back.sent.routes, self._back.sent.views, strict=True):
            values.copy_(self._in_whole(route.part, route.box))
        self._back.run(self._group, "parts from their owners")

    def pieces_of(self, parameter: str) -> Sequence[Piece]:
        """Return the pieces that make up this rank's shard of a parameter, with what was given back."""
        return self._given_back.get(parameter, ())

    def _in_whole(self, part: int, box: Box) -> Tensor:
        """Return the view of a whole part that holds `box`."""
        return self.wholes[part][slices_within(box, self.parts[part].box)]

    def _by_parameter(self, pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in pieces:
            found.setdefault(self.parts[piece.part].parameter, []).append(piece)
        return found


def _all_to_alls(
    directions: Sequence[Sequence[Route]], group: Group, dtype: torch.dtype, device: torch.device
) -> list[AllToAll]:
    """Return an all-to-all for the routes of each direction, which use the same buffers in turn."""
    sent = [[one for one in routes if one.sender == group.rank] for routes in directions]
    received = [[one for one in routes if one.receiver == group.rank] for routes in directions]
    outgoing, incoming = (
        torch.empty(max(map(_elements, each)), dtype=dtype, device=device) for each in (sent, received)
    )
    return [
        AllToAll(
            PackedBoxes.of(sends, [one.receiver for one in sends], group.ranks, outgoing),
            PackedBoxes.of(receives, [one.sender for one in receives], group.ranks, incoming),
            most_sent(routes),
            outgoing,
            incoming,
        )
        for routes, sends, receives in zip(directions, sent, received, strict=True)
    ]


def _elements(routes: Sequence[Route]) -> int:
    return sum(route.box.numel for route in routes)


def _whole_parts(owned: Sequence[OwnedPart], dtype: torch.dtype, device: torch.device) -> dict[int, Tensor]:
    """Return empty tensors for parts, by number, one after another in a flat tensor."""
    bounds = list(accumulate((part.box.numel for part in owned), initial=0))
    flat = torch.empty(bounds[-1], dtype=dtype, device=device)
    return {
        part.number: flat[start:stop].view(part.box.sizes)
        for part, (start, stop) in zip(owned, pairwise(bounds), strict=True)
    }
