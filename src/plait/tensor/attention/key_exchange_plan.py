"""Which keys each rank sends to which, and the kernel calls of each block: from positions and masks alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.plan.layout.sequence_layout import SequenceLayout, parts_of
from plait.ranks.accelerator import CPU
from plait.ranks.accelerator import sent as copied
from plait.tensor.attention.fused_kernels import PackedCall
from plait.tensor.attention.kernel_calls import BlockCall, block_calls, with_intervals_on
from plait.tensor.attention.visible_keys import needed_keys, visible_indices, visible_range
from plait.tensor.running_sequence import DocumentBounds, LocalSequence


@dataclass(frozen=True)
class Mask:
    """The mask of attention: keys of the query's document, not later if `causal`, closer than `window`."""

    causal: bool = True
    window: int | None = None


Selection = slice | Tensor
"""Indices along the sequence dim: a slice where they are consecutive, else int64."""


@dataclass(frozen=True)
class PeerBlock:
    """The keys that this rank and another of `cp` send each other, and attention calls on those received."""

    sent: Selection
    """The keys of this rank that the peer's queries see."""
    sent_count: int
    received_count: int
    """The number of the peer's keys that this rank's queries see."""
    calls: tuple[BlockCall, ...]
    """The kernel calls on the received keys."""
    key_ranges: tuple[range, ...]
    """The positions of the received keys."""

    def on(self, device: torch.device) -> PeerBlock:
        """Return a copy whose index tensors are on `device`."""
        sent = self.sent if isinstance(self.sent, slice) else copied(self.sent, device)
        return replace(self, sent=sent, calls=with_intervals_on(self.calls, device))


@dataclass(frozen=True)
class ExchangePlan:
    """Which keys a rank exchanges with each rank of `cp`, and the attention kernel calls on them."""

    index: int
    """This rank's index along `cp`."""
    positions: tuple[range, ...]
    """This rank's positions."""
    own: tuple[BlockCall, ...]
    """The kernel calls on the rank's own keys."""
    peers: tuple[PeerBlock | None, ...]
    """By index; None for this rank."""
    most: int
    """Key positions, more than which no rank sends."""
    packed: PackedCall | None = None
    """One call in place of `own`, for packed documents of which this rank has whole rows."""

    def on(self, device: torch.device) -> ExchangePlan:
        """Return a copy whose index tensors are on `device`."""
        peers = tuple(None if peer is None else peer.on(device) for peer in self.peers)
        packed = None if self.packed is None else self.packed.on(device)
        return replace(self, own=with_intervals_on(self.own, device), peers=peers, packed=packed)

    def sent(self, each: int) -> list[int]:
        """Return how many elements this rank sends to each rank, of `each` elements per key position."""
        return [0 if peer is None else each * peer.sent_count for peer in self.peers]

    def received(self, each: int) -> list[int]:
        """Return how many elements come from each rank, of `each` elements per key position."""
        return [0 if peer is None else each * peer.received_count for peer in self.peers]


def exchange_plan(sequence: LocalSequence, mask: Mask, device: torch.device) -> ExchangePlan:
    """Return which keys this rank exchanges over `cp` for `sequence`, and the kernel calls on them.

    Layers with an equal `mask` share it, and so do micro-batches with the same documents.
    """

    def compute() -> ExchangePlan:
        of_rank = sequence.layout, sequence.group.index, mask, sequence.packed
        if device.type == "meta":
            return remembered_plan(*of_rank, CPU).on(device)
        return remembered_plan(*of_rank, device)

    return sequence.result(("exchange plan", mask, device), compute)


@lru_cache(maxsize=64)
def remembered_plan(
    layout: SequenceLayout, index: int, mask: Mask, documents: DocumentBounds | None, device: torch.device
) -> ExchangePlan:
    """Return the exchange plan of the rank at `index` of `cp`, cached, with its indices on `device`."""
    return build_plan(layout, index, mask, documents).on(device)


def build_plan(
    layout: SequenceLayout, index: int, mask: Mask, documents: DocumentBounds | None = None
) -> ExchangePlan:
    """Return the exchange plan of the rank at `index` of `cp`: it receives only keys its queries see."""
    positions = [layout.positions(rank).numpy() for rank in range(layout.ranks)]
    seen = [
        visible_range(one, layout.length, causal=mask.causal, window=mask.window, documents=documents)
        for one in positions
    ]
    own = block_calls(*visible_indices(*seen[index], positions[index]))
    peers: list[PeerBlock | None] = []
    for peer, of_peer in enumerate(positions):
        if peer == index:
            peers.append(None)
            continue
        sent = needed_keys(*visible_indices(*seen[peer], positions[index]), len(positions[index]))
        begin, end = visible_indices(*seen[index], of_peer)
        received = needed_keys(begin, end, len(of_peer))
        ranges = [parts_of(layout.ranges[peer], run) for run in _runs(received)]
        before = np.append(0, received.cumsum())  # of each key, the number of received ones
        calls = block_calls(before[begin], before[end])
        counts = int(sent.sum()), int(before[-1])
        peers.append(PeerBlock(_selection(sent), *counts, calls, tuple(chain.from_iterable(ranges))))
    packed = None
    if documents is not None and layout.ranks == 1:
        packed = PackedCall.of(documents, mask.causal, mask.window)
    most = (layout.ranks - 1) * max(map(len, positions))
    return ExchangePlan(index, layout.ranges[index], own, tuple(peers), most, packed)


def _runs(which: NDArray[np.bool_]) -> list[slice]:
    """Return the indices of true elements, as slices."""
    ends = np.flatnonzero(np.diff(which, prepend=False, append=False))
    return [slice(*each) for each in ends.reshape(-1, 2).tolist()]


def _selection(which: NDArray[np.bool_]) -> Selection:
    runs = _runs(which)
    if len(runs) > 1:
        return torch.from_numpy(np.flatnonzero(which))
    return runs[0] if runs else slice(0, 0)


def selected(tensor: Tensor, which: Selection) -> Tensor:
    """Return `tensor` `[rows, heads, length, width]` at some indices of dim 2; for a slice a view."""
    if isinstance(which, slice):
        return tensor[:, :, which]
    return tensor.index_select(2, which)


def add_selected(total: Tensor, which: Selection, summand: Tensor) -> None:
    """Add `summand` in place to elements of `total` `[rows, heads, length, width]` at indices of dim 2."""
    if isinstance(which, slice):
        total[:, :, which] += summand
    else:
        total.index_add_(2, which, summand.to(total.dtype))
