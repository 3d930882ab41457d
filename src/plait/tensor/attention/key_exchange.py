"""The exchange of keys and values between the ranks of `cp`, and of their gradients back.

Each rank sends its keys and values straight to the ranks whose queries see them, in one uneven all-to-all.
The gradients of those keys return the same way, and are added at home in the order of the ranks: `cp - 1`
messages each way, and none for a rank's own block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from torch import Tensor

from plait.ranks.collectives import all_to_all_uneven
from plait.ranks.group import Group
from plait.tensor.attention.exchange_plan import Mask, add_selected, exchange_plan, selected
from plait.tensor.running_sequence import LocalSequence

Pair = tuple[Tensor, ...]
"""Keys and values, or their gradients: `[rows, heads, length, width]`."""


@dataclass(frozen=True)
class RankParts:
    """A flat tensor of consecutive parts, one for each rank, with a part for each of several tensors."""

    flat: Tensor
    sizes: list[int]
    """Elements of each rank's part."""
    each: int
    """Elements of one head at one position, over all tensors."""
    parts: list[Pair]
    """Views of `flat`, `[rows, heads, positions, width]`: by rank, then by tensor."""

    @staticmethod
    def of(like: Sequence[Tensor], sizes: Sequence[tuple[int, int]], flat: Tensor | None = None) -> RankParts:
        """Return each rank's heads and positions of tensors like these, in `flat` or uninitialised memory."""
        shapes = [[(one.shape[0], *size, one.shape[3]) for one in like] for size in sizes]
        counts = [[prod(shape) for shape in of_rank] for of_rank in shapes]
        flat = like[0].new_empty(sum(map(sum, counts))) if flat is None else flat
        views = iter(torch.split(flat, [*chain(*counts)]))
        parts = [tuple(next(views).view(shape) for shape in of_rank) for of_rank in shapes]
        each = sum(one.shape[0] * one.shape[3] for one in like)
        return RankParts(flat, [*map(sum, counts)], each, parts)


def start_exchange(sent: RankParts, received: RankParts, group: Group, most: int) -> Callable[[], Tensor]:
    """Start sending each rank its part; return a function that waits, and returns `received.flat`.

    `most`: heads times positions, more than which no rank sends. Communication: one uneven all-to-all.
    """
    if sent.flat.is_meta:
        return lambda sent=sent: received.flat  # type: ignore[misc]  # until the wait what is sent is kept
    sizes, elements = (sent.sizes, received.sizes), most * sent.each
    out = received.flat
    return all_to_all_uneven(sent.flat, group, *sizes, most=elements, out=out, checked=False).wait


class KeyExchange:
    """The exchanges of one layer and micro-batch: of keys and values, and of their gradients."""

    def __init__(self, sequence: LocalSequence, mask: Mask, device: torch.device) -> None:
        self.plan = exchange_plan(sequence, mask, device)
        self._parallelism = sequence.parallelism
        self._arriving: Callable[[], Tensor] | None = None
        self._returning: Callable[[], Tensor] | None = None

    @property
    def keeps(self) -> bool:
        """Whether received keys and values are kept for the backward."""
        return self._parallelism.keeps_keys

    def start(self, key: Tensor, value: Tensor) -> None:
        """Start sending keys and values. Communication: one all-to-all over `cp`."""
        sent = self._parts(self.plan.sent(1), key, value)
        for peer, parts in zip(self.plan.peers, sent.parts, strict=True):
            if peer is not None and peer.sent_count:
                for part, whole in zip(parts, (key, value), strict=True):
                    part.copy_(selected(whole, peer.sent))
        self._arriving = self._start(sent, self._parts(self.plan.received(1), key, value))

    def received(self, key: Tensor, value: Tensor) -> Tensor:
        """Wait for the other ranks' keys and values, and return them flat; `views_of` takes them apart.

        Where they were not sent in this pass (in a backward), they are sent now.
        """
        if self._arriving is None:
            self.start(key, value)
        assert self._arriving is not None
        arriving, self._arriving = self._arriving, None
        return arriving()

    def views_of(self, flat: Tensor, key: Tensor, value: Tensor) -> list[Pair]:
        """Return each peer's keys and values in a flat buffer, by index; empty ones for this rank."""
        return self._parts(self.plan.received(1), key, value, flat).parts

    def start_return(self, gradients: Tensor, key: Tensor, value: Tensor) -> None:
        """Start sending the gradients of received keys and values to their ranks, flat as received.

        Communication: one all-to-all over `cp`.
        """
        sent = self._parts(self.plan.received(1), key, value, gradients)
        self._returning = self._start(sent, self._parts(self.plan.sent(1), key, value))

    def with_returned(self, key: Tensor, value: Tensor) -> Pair:
        """Wait for the gradients from other ranks; return their sums with those of this rank's own queries.

        16-bit gradients are summed in float32.
        """
        if self._returning is None:
            return key, value
        self.overlap()
        returning, self._returning = self._returning, None
        wide = torch.promote_types(key.dtype, torch.float32)
        totals = key.to(wide), value.to(wide)
        returned = self._parts(self.plan.sent(1), key, value, returning())
        for peer, pair in zip(self.plan.peers, returned.parts, strict=True):
            if peer is not None and peer.sent_count:
                for total, part in zip(totals, pair, strict=True):
                    add_selected(total, peer.sent, part)
        return tuple(total.to(key.dtype) for total in totals)

    def overlap(self) -> None:
        """Compute queued weight gradients while a message is on its way."""
        if self._parallelism.overlap is not None:
            self._parallelism.overlap()

    def _parts(
        self, counts: Sequence[int], key: Tensor, value: Tensor, flat: Tensor | None = None
    ) -> RankParts:
        """Return each rank's part of keys and values, of so many positions."""
        return RankParts.of((key, value), [(key.shape[1], count) for count in counts], flat)

    def _start(self, sent: RankParts, received: RankParts) -> Callable[[], Tensor]:
        most = sent.parts[0][0].shape[1] * self.plan.most
        return start_exchange(sent, received, self._parallelism.group, most)
