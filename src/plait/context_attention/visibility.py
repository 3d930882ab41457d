"""Which keys each query of a sequence sees, and the kernel calls that compute exactly these pairs.

With a causal mask, documents and a window, a query at position p sees the keys at positions in `[lo, hi)`:

    lo = max(start of its document, p - window + 1)
    hi = p + 1 if causal, else min(stop of its document, p + window)

From one query to the next both ends only grow. The calls follow the shape of this staircase:

    #                       queries of a document in a     #
    # #                     row: one causal call for       # #
    # # #                   each document. A window:       # # #
          #                 first a causal call, then        # # #
          # #               tiles of queries, each with        # # #
              #             a mask of the keys that its          # # #
              # #           queries see                            # # #

All tensors are int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from plait.autograd.running_sequence import DocumentBounds
from plait.device import sent
from plait.errors import ModelError

TILE = 256
"""The largest number of queries of a call with a mask: its keys are those that any of them sees."""
SHORT = 32
"""Pieces of fewer queries share a call with a mask: to launch one for each would take longer."""


def document_bounds(document_ids: Tensor) -> DocumentBounds:
    """Return where each token's document begins and ends; a document is a run of equal ids in a row.

    `document_ids`: `[rows, length]`, on the CPU.
    """
    rows, length = document_ids.shape
    if length == 0:
        none = torch.zeros(rows, 0, dtype=torch.int64)
        return DocumentBounds(none, none)
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    ends = torch.ones(rows, length, dtype=torch.bool)
    ends[:, :-1] = begins[:, 1:]
    positions = torch.arange(length)
    starts = torch.where(begins, positions, 0).cummax(1).values
    stops = torch.where(ends, positions + 1, length).flip(1).cummin(1).values.flip(1)
    return DocumentBounds(starts, stops)


def visible_range(
    positions: Tensor,
    length: int,
    *,
    causal: bool,
    window: int | None = None,
    documents: DocumentBounds | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `lo` and `hi`: the queries at `positions` `[n]` see the keys at positions `lo ≤ k < hi`.

    `length`: that of the sequence. `window`: with `causal` the number of keys that a query sees, itself and
    those before it; else it sees the keys less than `window` away. `documents`: None where a row is
    one document. Both results are `[rows, n]`, or `[1, n]` without `documents`. Raises ModelError for a
    window of less than 1.
    """
    if window is not None and window < 1:
        raise ModelError(
            f"attention has a window of {window} tokens: give at least 1, the query itself, or None for all."
        )
    lo, hi = torch.zeros_like(positions)[None], torch.full_like(positions, length)[None]
    if documents is not None:
        lo, hi = documents.starts[:, positions], documents.stops[:, positions]
    if window is not None:
        lo, hi = lo.maximum(positions - window + 1), hi.minimum(positions + window)
    if causal:
        hi = hi.minimum(positions + 1)
    return lo, hi


def visible_indices(lo: Tensor, hi: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each query the index of the first key that it sees, and the index after the last.

    `lo`, `hi`: the result of `visible_range`, `[rows, n]`; `key_positions`: ascending, `[m]`. A query that
    sees none of these keys has two equal indices.
    """
    key_positions = key_positions.contiguous()
    begin = torch.searchsorted(key_positions, lo.contiguous())
    return begin, torch.searchsorted(key_positions, hi.contiguous())


def needed_keys(lo: Tensor, hi: Tensor, key_positions: Tensor) -> Tensor:
    """Return the ascending indices of the keys that at least one query of at least one row sees.

    `lo`, `hi`: the result of `visible_range`, `[rows, n]`; `key_positions`: ascending, `[m]`.
    """
    begin, end = visible_indices(lo, hi, key_positions)
    change = torch.zeros(len(key_positions) + 1, dtype=torch.int64)
    one = torch.ones(begin.numel(), dtype=torch.int64)
    change.index_add_(0, begin.flatten(), one).index_add_(0, end.flatten(), -one)
    return change.cumsum(0)[:-1].nonzero().squeeze(1)


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
    they all see the same keys. A query that sees nothing is a piece.
    """
    sees = begin < end
    same_first = sees[1:] & sees[:-1] & (begin[1:] == begin[:-1])
    growth = end[1:] - end[:-1]
    constant, grows = same_first & (growth == 0), same_first & (growth == 1)
    grows[1:] &= ~constant[:-1]
    breaks = torch.ones_like(sees)
    breaks[1:] = ~(constant | grows)
    return breaks
