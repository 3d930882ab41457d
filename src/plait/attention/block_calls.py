"""Kernel calls that together compute the attention of a block of queries to a block of keys.

A query sees an interval of the block's keys; seen from one query to the next, both of its ends only grow.
The calls follow from the shape of this staircase, here for three causal documents and for a window:

    #                       queries of a document in a     #
    # #                     row: one causal call for       # #
    # # #                   each document. A window:       # # #
          #                 first a causal call, then        # # #
          # #               tiles of queries, each with        # # #
              #             a mask of the keys that its          # # #
              # #           queries see                            # # #
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from plait.attention.visibility import visible_indices
from plait.device import sent

TILE = 256
"""The largest number of queries of a call with a mask: its keys are those that any of them sees."""
SHORT = 32
"""Pieces of fewer queries share a call with a mask: to launch one for each would take longer."""


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One kernel call: slices of the batch's rows, of queries and of keys, and which pairs it computes."""

    rows: slice
    query: slice
    key: slice
    mask: Literal["full", "causal"] | Tensor
    """`full`: all pairs. `causal`: query i of the slice sees keys 0 … i of the slice, as far as there are.

    Else bool `[queries, keys]`: True where the query sees the key.
    """


def block_calls(lo: Tensor, hi: Tensor, key_positions: Tensor) -> tuple[BlockCall, ...]:
    """Return calls that compute each visible pair of a query and a key once, in a few kernels.

    `lo`, `hi`: the result of `visible_range` for queries at ascending positions, `[rows, n]`;
    `key_positions`: ascending, `[m]`. A query can be in several calls, or in none. Rows that are all alike,
    also a single row, have the slice `slice(None)`. Equal masks are the same tensor.
    """
    if 0 in lo.shape:
        return ()
    begin, end = visible_indices(lo, hi, key_positions)
    masks: dict[tuple[bytes, bytes, int], Tensor] = {}
    calls: list[BlockCall] = []
    for rows, first in _equal_rows(begin, end):
        cover = _Cover(rows, begin[first], end[first], masks)
        for start, stop in cover.pieces():
            calls.extend(cover.calls(start, stop))
    return tuple(calls)


def with_masks_on(calls: tuple[BlockCall, ...], device: torch.device) -> tuple[BlockCall, ...]:
    """Return the calls with their masks on `device`: each different mask is copied once, without a wait."""
    masks = {id(call.mask): call.mask for call in calls if isinstance(call.mask, Tensor)}
    copies = {key: sent(mask, device) for key, mask in masks.items()}
    return tuple(replace(call, mask=copies.get(id(call.mask), call.mask)) for call in calls)


def _equal_rows(begin: Tensor, end: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield slices of consecutive rows with equal indices, and the first row of each."""
    count = len(begin)
    differs = ((begin[1:] != begin[:-1]) | (end[1:] != end[:-1])).any(1)
    starts = [0, *(differs.nonzero().squeeze(1) + 1).tolist()]
    if len(starts) == 1:
        yield slice(None), 0
        return
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        yield slice(start, stop), start


class _Cover:
    """The calls for the rows of a slice, whose queries all see the same keys."""

    def __init__(
        self, rows: slice, begin: Tensor, end: Tensor, masks: dict[tuple[bytes, bytes, int], Tensor]
    ) -> None:
        """`begin`, `end`: `[n]`, indices of the keys that each query sees; `masks`: those made so far."""
        self.rows, self.begin, self.end, self.masks = rows, begin, end, masks
        self.breaks = _breaks(begin, end)
        """By query, whether it begins a new piece: a piece takes at most two calls, without a mask."""

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of queries: pieces, or tiles of neighbouring short pieces."""
        starts = self.breaks.nonzero().squeeze(1)
        lengths = starts.diff(append=torch.tensor([len(self.breaks)]))
        short = lengths < SHORT
        # A short piece joins a short piece before it, unless many keys lie between those that the two see.
        near = self.begin[starts[1:]] - self.end[starts[1:] - 1] <= SHORT
        kept = torch.ones_like(short)
        kept[1:] = ~(short[1:] & short[:-1] & near)
        groups = starts[kept].tolist()
        for start, stop in zip(groups, [*groups[1:], len(self.breaks)], strict=True):
            step = TILE if bool(self.breaks[start + 1 : stop].any()) else stop - start
            for tile in range(start, stop, step):
                yield tile, min(tile + step, stop)

    def calls(self, start: int, stop: int) -> Iterator[BlockCall]:
        """Yield the calls for a range of queries."""
        seeing = (self.begin[start:stop] < self.end[start:stop]).nonzero().squeeze(1)
        if not len(seeing):
            return
        start, stop = start + int(seeing[0]), start + int(seeing[-1]) + 1
        if bool(self.breaks[start + 1 : stop].any()):
            yield from self._masked(start, stop)
            return
        first, after = int(self.begin[start]), int(self.end[stop - 1])
        common = int(self.end[start]) - (int(self.end[start]) < after)  # the diagonal begins at its last key
        if first < common:
            yield BlockCall(self.rows, slice(start, stop), slice(first, common), "full")
        if common < after:
            yield BlockCall(self.rows, slice(start, stop), slice(common, after), "causal")

    def _masked(self, start: int, stop: int) -> Iterator[BlockCall]:
        """Yield a call with a mask, after one for the keys that all see if these lie beside the others."""
        begin, end = self.begin[start:stop], self.end[start:stop]
        first, after = int(begin[0]), int(end[-1])
        common = int(begin[-1]), int(end[0])
        if common[1] - common[0] >= TILE and (first == common[0] or after == common[1]):
            yield BlockCall(self.rows, slice(start, stop), slice(*common), "full")
            first, after = (common[1], after) if first == common[0] else (first, common[0])
        if first < after:
            mask = self._mask(
                begin.clamp(first, after) - first, end.clamp(first, after) - first, after - first
            )
            yield BlockCall(self.rows, slice(start, stop), slice(first, after), mask)

    def _mask(self, begin: Tensor, end: Tensor, count: int) -> Tensor:
        key = begin.numpy().tobytes(), end.numpy().tobytes(), count
        if key not in self.masks:
            keys = torch.arange(count)
            self.masks[key] = (begin[:, None] <= keys) & (keys < end[:, None])
        return self.masks[key]


def _breaks(begin: Tensor, end: Tensor) -> Tensor:
    """Return for each query, bool `[n]`, whether it begins a new piece.

    Within a piece all queries see the same first key; each sees one key more than the query before it, until
    they all see the same keys. Or all queries of a piece see nothing.
    """
    sees = begin < end
    same_first = sees[1:] & sees[:-1] & (begin[1:] == begin[:-1])
    growth = end[1:] - end[:-1]
    constant, grows = same_first & (growth == 0), same_first & (growth == 1)
    grows[1:] &= ~constant[:-1]
    breaks = torch.ones_like(sees)
    breaks[1:] = ~(constant | grows | ~(sees[1:] | sees[:-1]))
    return breaks
