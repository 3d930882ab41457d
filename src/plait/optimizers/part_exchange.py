"""The exchange of parts of parameters between the ranks that hold shards of them and the parts' owners.

    put            a rank's shard goes to the outgoing buffer, or to this rank's own whole parts
    gather         one all-to-all; then `wholes` has the parts that this rank owns
    give_back      one all-to-all; then `pieces_of` has what this rank's shard gets of each part

An owner gets each element once, and what it holds itself is only copied. Every rank gets back what it holds,
copies too. All parts have one dtype, and the buffers are allocated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from plait.optimizers.part_owners import OwnedPart, boxes_within
from plait.plan.layout.layout import Box
from plait.plan.layout.routes import BoxRouter, BoxTransfer, RankBoxes
from plait.plan.layout.shards import ShardBox, intersection, slices_within
from plait.ranks.box_exchange import by_other_rank, most_sent, packed_boxes
from plait.ranks.collectives import all_to_all_uneven
from plait.ranks.group import Group


@dataclass(frozen=True)
class Piece:
    """The overlap of this rank's shard with an owner's part, and the buffer view in which it is exchanged."""

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

    transfers: Sequence[BoxTransfer]
    views: Sequence[Tensor]
    """Of the buffer, one for each transfer, of the box's shape."""
    sizes: Sequence[int]
    """The number of elements for, or from, each rank of the group."""

    @staticmethod
    def of(by_rank: Sequence[Sequence[BoxTransfer]], buffer: Tensor) -> PackedBoxes:
        """Pack the boxes of `by_rank`, those for or from each rank of the group, into `buffer`."""
        pairs = [*packed_boxes(by_rank, buffer)]
        sizes = [_elements(each) for each in by_rank]
        return PackedBoxes([one for one, _ in pairs], [view for _, view in pairs], sizes)


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
    """Gathers parts of sharded parameters on the ranks that own them, and sends results back."""

    def __init__(
        self,
        parts: Sequence[OwnedPart],
        held: Mapping[str, RankBoxes],
        shards: Mapping[str, Sequence[ShardBox]],
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts`: those that ranks of `group` own, on all of them alike; `held`: which rank holds which box.

        Both by parameter, as `shards`, the boxes of this rank's shards.
        """
        self.parts, self._shards, self._group = parts, shards, group
        self._part_named = {part.name: part for part in parts}
        self.wholes = _whole_parts([one for one in parts if one.owner == group.rank], dtype, device)
        """The parts that this rank owns, by number."""
        to_owners, from_owners = transfers_to_owners(parts, held), transfers_from_owners(parts, held)
        self._there, self._back = _all_to_alls((to_owners, from_owners), group, dtype, device)
        own = [one for one in from_owners if one.is_local and one.receiver == group.rank]
        copied = [(one, self._in_whole(one)) for one in own]
        self._put = self._pieces(copied + _with_views(self._there.sent))
        self._given_back = self._pieces(copied + _with_views(self._back.received))

    def put(self, parameter: str, shard: Tensor) -> None:
        """Copy the parts of this rank's contiguous `shard` that owners need to the send buffer."""
        for piece in self.pieces_for_owners(parameter):
            piece.exchanged.copy_(piece.of(shard))

    def pieces_for_owners(self, parameter: str) -> Sequence[Piece]:
        """Return the parts of this rank's shard that owners need, with their places in the send buffer."""
        return self._put.get(parameter, ())

    def gather(self) -> None:
        """Send shards copied by `put` to the owners; then `wholes` holds each part that this rank owns.

        Communication: one all-to-all over the group, of each element that its owner does not hold.
        """
        self._there.run(self._group, "parts for their owners")
        for transfer, values in _with_views(self._there.received):
            self._in_whole(transfer).copy_(values)

    def give_back(self) -> None:
        """Send the values in `wholes` to all ranks that hold them, so that `pieces_of` has them.

        Communication: one all-to-all over the group, of each element for each rank that holds it, without
        the owner.
        """
        for transfer, values in _with_views(self._back.sent):
            values.copy_(self._in_whole(transfer))
        self._back.run(self._group, "parts from their owners")

    def pieces_of(self, parameter: str) -> Sequence[Piece]:
        """Return the overlaps of this rank's shard with owners' parts, with values that owners sent back."""
        return self._given_back.get(parameter, ())

    def _in_whole(self, transfer: BoxTransfer) -> Tensor:
        """Return the view of a part that this rank owns that holds the transfer's box."""
        part = self._part_named[transfer.tensor]
        return self.wholes[part.number][slices_within(transfer.box, part.box)]

    def _pieces(self, exchanged: Iterable[tuple[BoxTransfer, Tensor]]) -> dict[str, list[Piece]]:
        """Return the pieces of this rank's shards by parameter, with the memory of each."""
        found: dict[str, list[Piece]] = {}
        for transfer, view in exchanged:
            part = self._part_named[transfer.tensor]
            boxes = self._shards[part.parameter]
            home = next(one for one in boxes if intersection(one.box, transfer.box) == transfer.box)
            found.setdefault(part.parameter, []).append(Piece(part.number, transfer.box, home, view))
        return found


def transfers_to_owners(parts: Iterable[OwnedPart], held: Mapping[str, RankBoxes]) -> list[BoxTransfer]:
    """Return the transfers that gather each part on its owner, from the ranks that hold some of it."""
    router = BoxRouter()
    each = (
        router.transfers(
            part.name, boxes_within(part.box, held[part.parameter]), {part.owner: (part.box,)}, itemsize=1
        )
        for part in parts
    )
    return [one for transfers in each for one in transfers]


def transfers_from_owners(parts: Iterable[OwnedPart], held: Mapping[str, RankBoxes]) -> list[BoxTransfer]:
    """Return the transfers that send each part from its owner to all ranks that hold some of it."""
    return [
        BoxTransfer(part.name, box, part.owner, rank)
        for part in parts
        for rank, boxes in boxes_within(part.box, held[part.parameter]).items()
        for box in boxes
    ]


def _all_to_alls(
    directions: Sequence[Sequence[BoxTransfer]], group: Group, dtype: torch.dtype, device: torch.device
) -> list[AllToAll]:
    """Return an all-to-all for the transfers of each direction, which use the same buffers in turn."""
    moved = [[one for one in transfers if not one.is_local] for transfers in directions]
    sent, received = zip(*(by_other_rank(each, group) for each in moved), strict=True)
    outgoing, incoming = (
        torch.empty(max(sum(map(_elements, one)) for one in each), dtype=dtype, device=device)
        for each in (sent, received)
    )
    return [
        AllToAll(
            PackedBoxes.of(sends, outgoing),
            PackedBoxes.of(receives, incoming),
            most_sent(transfers),
            outgoing,
            incoming,
        )
        for transfers, sends, receives in zip(moved, sent, received, strict=True)
    ]


def _elements(transfers: Iterable[BoxTransfer]) -> int:
    return sum(one.box.numel for one in transfers)


def _with_views(packed: PackedBoxes) -> list[tuple[BoxTransfer, Tensor]]:
    return list(zip(packed.transfers, packed.views, strict=True))


def _whole_parts(owned: Sequence[OwnedPart], dtype: torch.dtype, device: torch.device) -> dict[int, Tensor]:
    """Return empty tensors for parts, by number, one after another in a flat tensor."""
    bounds = list(accumulate((part.box.numel for part in owned), initial=0))
    flat = torch.empty(bounds[-1], dtype=dtype, device=device)
    return {
        part.number: flat[start:stop].view(part.box.sizes)
        for part, (start, stop) in zip(owned, pairwise(bounds), strict=True)
    }
