"""Plans transfers between layouts: which box of which tensor each rank gets from which rank.

    rank 0 holds rows 0–3    rank 2 needs rows 2–5    rank 0 → rank 2   rows 2, 3
    rank 1 holds rows 4–7                             rank 1 → rank 2   rows 4, 5

What a rank needs and holds already comes from itself. Of several holders that one sends which has the fewest
bytes to send so far, and of equal ones the nearest to the receiver. All ranks that decide for the same
tensors in the same order get the same transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.errors import LayoutError
from plait.plan.layout.layout import Box, Layout
from plait.plan.layout.shards import intersection, overlap, shard_boxes

RankBoxes = Mapping[int, Sequence[Box]]
"""Disjoint boxes of a global tensor by rank."""


@dataclass(frozen=True)
class BoxTransfer:
    """A box of a tensor that one rank sends to another, or that a rank has already (`is_local`)."""

    tensor: str
    box: Box
    sender: int
    receiver: int

    @property
    def is_local(self) -> bool:
        """Whether the receiver holds the box itself, so that nothing is sent."""
        return self.sender == self.receiver


class BoxRouter:
    """Chooses the sender of each box that a rank needs, so that ranks send equally many bytes."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        """The bytes that each rank sends in all transfers chosen so far."""

    def transfers(
        self, tensor: str, held: RankBoxes, needed: RankBoxes, itemsize: int
    ) -> tuple[BoxTransfer, ...]:
        """Return transfers that give each rank the boxes it needs, each element once, of `itemsize` bytes.

        `held`: the boxes that ranks hold; a box may be held by several, also in part. Raises LayoutError
        where a rank needs elements that none holds.
        """
        cells = list(_cells(held))
        found: list[BoxTransfer] = []
        for receiver, boxes in sorted(needed.items()):
            for box in boxes:
                missing = box.numel
                for cell, holders in cells:
                    common = intersection(box, cell)
                    if common.numel:
                        sender = self._sender(holders, receiver, common.numel * itemsize)
                        found.append(BoxTransfer(tensor, common, sender, receiver))
                        missing -= common.numel
                if missing:
                    raise LayoutError(
                        f"rank {receiver} needs {box.numel:,} elements of {tensor}, of which no rank holds "
                        f"{missing:,}: give a layout whose ranks hold all of it."
                    )
        return tuple(found)

    def _sender(self, holders: Sequence[int], receiver: int, nbytes: int) -> int:
        if receiver in holders:
            return receiver
        sender = min(holders, key=lambda rank: (self.sent.get(rank, 0), abs(rank - receiver), rank))
        self.sent[sender] = self.sent.get(sender, 0) + nbytes
        return sender


def _cells(held: RankBoxes) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield disjoint boxes that cover all held ones, each with the ranks that hold all of it."""
    ranks: dict[Box, list[int]] = {}
    for rank, boxes in sorted(held.items()):
        for box in boxes:
            ranks.setdefault(box, []).append(rank)
    if overlap(list(ranks)) is None:  # as of the ranks of one layout
        yield from ((box, tuple(holders)) for box, holders in ranks.items() if box.numel)
    else:
        yield from _divided_cells(held)


def _divided_cells(held: RankBoxes) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield disjoint boxes, each with the ranks that have it, cut from boxes that overlap."""
    cells: dict[Box, tuple[int, ...]] = {}
    for rank, boxes in sorted(held.items()):
        for box in boxes:
            if box in cells:
                cells[box] = *cells[box], rank
                continue
            rest = [box]
            for cell, holders in list(cells.items()):
                common = intersection(box, cell)
                if common.numel:
                    del cells[cell]
                    cells |= dict.fromkeys(without(cell, common), holders)
                    cells[common] = *holders, rank
                    rest = [part for one in rest for part in without(one, common)]
            cells |= {part: (rank,) for part in rest if part.numel}
    yield from cells.items()


def without(box: Box, other: Box) -> list[Box]:
    """Return disjoint boxes that cover the elements of `box` that are not in `other`."""
    common = intersection(box, other)
    if not common.numel:
        return [box] if box.numel else []
    found, offsets, sizes = [], list(box.offsets), list(box.sizes)
    for dim, (first, count) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        stop = offsets[dim] + sizes[dim]
        for start, end in ((offsets[dim], first), (first + count, stop)):
            if start < end:
                part = (
                    (*offsets[:dim], start, *offsets[dim + 1 :]),
                    (*sizes[:dim], end - start, *sizes[dim + 1 :]),
                )
                found.append(Box(*part))
        offsets[dim], sizes[dim] = first, count
    return found


def boxes_by_rank(
    layout: Layout, places: Iterable[tuple[int, Mapping[str, int]]]
) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of a tensor that each rank holds; `places`: ranks, each with its coordinate."""
    known: dict[tuple[int, ...], tuple[Box, ...]] = {}
    found = {}
    for rank, where in places:
        owner = layout.owner(where)
        if owner not in known:
            known[owner] = tuple(part.box for part in shard_boxes(layout, owner))
        found[rank] = known[owner]
    return found
