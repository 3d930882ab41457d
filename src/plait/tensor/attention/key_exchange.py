"""The exchange of keys and values between the ranks of `cp`, and of their gradients back.

Each rank sends its keys and values straight to the ranks whose queries see them, in one uneven all-to-all.
The gradients of those keys return the same way, and are added at home in the order of the ranks: `cp - 1`
messages each way, and none for a rank's own block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.ranks.collectives import all_to_all_uneven
from plait.tensor.attention.exchange_plan import Mask, add_selected, exchange_plan, selected, sizes_of, views
from plait.tensor.running_sequence import LocalSequence

Pair = tuple[Tensor, ...]
"""Keys and values, or their gradients: `[rows, heads, length, width]`."""


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
        each = sizes_of(key, value)
        flat = key.new_empty(sum(self.plan.sent(each)))
        parts_of_peers = views(flat, self.plan.sent(1), (key, value))
        for peer, parts in zip(self.plan.peers, parts_of_peers, strict=True):
            if peer is not None and peer.sent_count:
                for part, whole in zip(parts, (key, value), strict=True):
                    part.copy_(selected(whole, peer.sent))
        self._arriving = self._exchange(flat, self.plan.sent(each), self.plan.received(each), each)

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
        return views(flat, self.plan.received(1), (key, value))

    def start_return(self, gradients: Tensor, each: int) -> None:
        """Start sending the gradients of received keys and values to their ranks, flat as received.

        `each`: elements for each key position. Communication: one all-to-all over `cp`.
        """
        self._returning = self._exchange(gradients, self.plan.received(each), self.plan.sent(each), each)

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
        parts = views(returning(), self.plan.sent(1), (key, value))
        for peer, pair in zip(self.plan.peers, parts, strict=True):
            if peer is not None and peer.sent_count:
                for total, part in zip(totals, pair, strict=True):
                    add_selected(total, peer.sent, part)
        return tuple(total.to(key.dtype) for total in totals)

    def overlap(self) -> None:
        """Compute queued weight gradients while a message is on its way."""
        if self._parallelism.overlap is not None:
            self._parallelism.overlap()

    def _exchange(
        self, flat: Tensor, sent: Sequence[int], received: Sequence[int], each: int
    ) -> Callable[[], Tensor]:
        if flat.is_meta:
            result = flat.new_empty(sum(received))
            return lambda sent=flat: result  # type: ignore[misc]  # until the wait what is sent is kept
        most, group = each * self.plan.most, self._parallelism.group
        return all_to_all_uneven(flat, group, sent, received, most=most, checked=False).wait
