"""Sends boxes of tensors between ranks when layouts change: many tensors packed into few all-to-alls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from plait.plan.layout.layout import Box
from plait.plan.layout.routes import BoxTransfer
from plait.plan.layout.shards import ShardBox, full_box, intersection, slices_within
from plait.ranks.collectives import all_to_all_uneven
from plait.ranks.group import Group


@dataclass(frozen=True)
class LocalBoxes:
    """A contiguous tensor of this rank, and the boxes of a global tensor that it holds."""

    tensor: Tensor
    boxes: Sequence[ShardBox]

    @staticmethod
    def whole(tensor: Tensor) -> LocalBoxes:
        """Return `LocalBoxes` of one box, the whole `tensor`: a rank that holds all of a global tensor."""
        box = full_box(tensor.shape)
        return LocalBoxes(tensor, (ShardBox(box, 0, box.sizes, box.slices),))

    def view_of(self, box: Box) -> Tensor:
        """Return the view of `tensor` that holds `box`, which lies within one of this rank's boxes."""
        home = next(one for one in self.boxes if intersection(one.box, box) == box)
        return home.view_of(self.tensor)[slices_within(box, home.box)]


@torch.no_grad()
def exchange_boxes(
    transfers: Sequence[BoxTransfer],
    sources: Mapping[str, LocalBoxes],
    targets: Mapping[str, LocalBoxes],
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    *,
    most: int | None = None,
) -> None:
    """Copy each box of `transfers` from its sender's `sources` to its receiver's `targets`, by tensor name.

    All ranks of `group` give the same transfers, in the same order. `dtype` is that in which boxes are sent,
    and `device` this rank's in the group; targets may have another. `most`: elements that a rank may send and
    receive in one all-to-all, beside its memory for `sources` and `targets`; a single transfer may have more.
    Communication: an all-to-all over the group for each round of transfers, none where all are local.
    """
    for one in transfers:
        if one.is_local and one.receiver == group.rank:
            targets[one.tensor].view_of(one.box).copy_(sources[one.tensor].view_of(one.box))
    for chosen in _rounds([one for one in transfers if not one.is_local], most):
        _exchange(chosen, sources, targets, group, dtype, device)


def _rounds(transfers: Sequence[BoxTransfer], most: int | None) -> Iterator[list[BoxTransfer]]:
    """Yield the transfers in order, so many at a time that no rank moves more elements than `most`."""
    chosen, loads = list[BoxTransfer](), dict[int, int]()
    for one in transfers:
        ends = (one.sender, one.receiver)
        if chosen and most is not None and any(loads.get(r, 0) + one.box.numel > most for r in ends):
            yield chosen
            chosen, loads = [], {}
        chosen.append(one)
        for rank in ends:
            loads[rank] = loads.get(rank, 0) + one.box.numel
    if chosen:
        yield chosen


def _exchange(
    transfers: Sequence[BoxTransfer],
    sources: Mapping[str, LocalBoxes],
    targets: Mapping[str, LocalBoxes],
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run transfers between different ranks, as one all-to-all."""
    sends, receives = by_other_rank(transfers, group)
    sent, received = ([sum(one.box.numel for one in each) for each in side] for side in (sends, receives))
    outgoing = torch.empty(sum(sent), dtype=dtype, device=device)
    for one, packed in packed_boxes(sends, outgoing):
        packed.copy_(sources[one.tensor].view_of(one.box))
    most = most_sent(transfers)
    started = all_to_all_uneven(outgoing, group, sent, received, most=most, checked=False)
    incoming = started.about("boxes of tensors in another layout").wait()
    for one, packed in packed_boxes(receives, incoming):
        targets[one.tensor].view_of(one.box).copy_(packed)


def by_other_rank(
    transfers: Iterable[BoxTransfer], group: Group
) -> tuple[list[list[BoxTransfer]], list[list[BoxTransfer]]]:
    """Return two lists, by rank of the group: this rank's transfers to that rank, and those from it."""
    sends: dict[int, list[BoxTransfer]] = {rank: [] for rank in group.ranks}
    receives: dict[int, list[BoxTransfer]] = {rank: [] for rank in group.ranks}
    for one in transfers:
        if one.sender == group.rank:
            sends[one.receiver].append(one)
        if one.receiver == group.rank:
            receives[one.sender].append(one)
    return [*sends.values()], [*receives.values()]


def most_sent(transfers: Iterable[BoxTransfer]) -> int:
    """Return the largest number of elements that any single rank sends in `transfers`."""
    sent: dict[int, int] = {}
    for one in transfers:
        sent[one.sender] = sent.get(one.sender, 0) + one.box.numel
    return max(sent.values(), default=0)


def packed_boxes(
    by_rank: Sequence[Sequence[BoxTransfer]], flat: Tensor
) -> Iterator[tuple[BoxTransfer, Tensor]]:
    """Yield each transfer with its view of `flat`, in which boxes follow one another, by rank."""
    start = 0
    for one in chain.from_iterable(by_rank):
        yield one, flat[start : start + one.box.numel].view(one.box.sizes)
        start += one.box.numel
