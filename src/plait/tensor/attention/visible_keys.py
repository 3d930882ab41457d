"""Masks of attention: which keys each query of a sequence sees, and kernel calls for exactly these pairs.

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

Arrays are int64; they are made on the host for each micro-batch of packed documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ModelError
from plait.ranks.device import sent
from plait.tensor.running_sequence import DocumentBounds

Indices = NDArray[np.int64]
TILE = 256
"""The largest number of queries of a call with a mask: its keys are those that any of them sees."""
SHORT = 32
"""Parts of fewer queries share a call with a mask: to launch one for each would take longer."""


def document_bounds(document_ids: Tensor) -> DocumentBounds:
    """Return where documents begin; a document is a run of equal ids in a row of `document_ids`.

    `document_ids`: `[rows, length]`, on the CPU; negative ones are those of padding.
    """
    ids = document_ids.numpy()
    first = [0] if ids.shape[1] else []
    begins = ids[:, 1:] != ids[:, :-1]
    starts = tuple((*first, *(np.flatnonzero(row) + 1).tolist()) for row in begins)
    padding: tuple[tuple[int, ...], ...] = ()
    if (ids < 0).any():
        padding = tuple(
            tuple(np.flatnonzero(row[list(first)] < 0).tolist())
            for row, first in zip(ids, starts, strict=True)
        )
    return DocumentBounds(ids.shape[1], starts, padding)


def visible_range(
    positions: Indices,
    length: int,
    *,
    causal: bool,
    window: int | None = None,
    documents: DocumentBounds | None = None,
) -> tuple[Indices, Indices]:
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
    lo, hi = np.zeros_like(positions)[None], np.full_like(positions, length)[None]
    if documents is not None:
        lo, hi = documents.by_position().take(positions, axis=-1)
    if window is not None:
        lo, hi = np.maximum(lo, positions - window + 1), np.minimum(hi, positions + window)
    if causal:
        hi = np.minimum(hi, positions + 1)
    return lo, hi


def visible_indices(lo: Indices, hi: Indices, key_positions: Indices) -> tuple[Indices, Indices]:
    """Return for each query the index of the first key that it sees, and the index after the last.

    `lo`, `hi`: the result of `visible_range`, `[rows, n]`; `key_positions`: ascending, `[m]`. A query that
    sees none of these keys has two equal indices.
    """
    keys_before = np.zeros(int(hi.max(initial=0)) + 1, dtype=np.int64)
    keys_before[key_positions[key_positions < len(keys_before) - 1] + 1] = 1
    keys_before = keys_before.cumsum()
    return keys_before[lo], keys_before[hi]


def needed_keys(begin: Indices, end: Indices, count: int) -> NDArray[np.bool_]:
    """Return for each of `count` keys whether some query of some row sees it.

    `begin`, `end`: the result of `visible_indices`.
    """
    change = np.bincount(begin.ravel(), minlength=count + 1) - np.bincount(end.ravel(), minlength=count + 1)
    needed: NDArray[np.bool_] = change.cumsum()[:-1] > 0
    return needed


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One attention kernel call: which rows, queries and keys it takes, and which keys each query sees."""

    rows: slice
    query: slice
    key: slice
    seen: Literal["full", "causal"] | Tensor
    """`full`: all pairs. `causal`: query i of the slice sees keys 0 … i of the slice, as far as there are.

    Else int32 `[2, queries]`: the index in the slice of the first key that a query sees, and after the last.
    """

    @property
    def mask(self) -> Literal["full", "causal"] | Tensor:
        """The mask for kernels: "full", "causal", or a new bool tensor `[queries, keys]`."""
        if not isinstance(self.seen, Tensor):
            return self.seen
        begin, end = self.seen.unsqueeze(-1)
        keys = torch.arange(self.key.stop - self.key.start, dtype=torch.int32, device=self.seen.device)
        mask: Tensor = (begin <= keys) & (keys < end)
        return mask


def block_calls(begin: Indices, end: Indices) -> tuple[BlockCall, ...]:
    """Return a few kernel calls that together compute each visible pair of query and key once.

    `begin`, `end`: the result of `visible_indices` for queries and keys at ascending positions, `[rows, n]`.
    A query can be in several calls, or in none. Rows that are all alike, also a single row, have the slice
    `slice(None)`. Equal intervals are the same tensor.
    """
    if 0 in begin.shape:
        return ()
    intervals: dict[bytes, Tensor] = {}
    calls: list[BlockCall] = []
    for rows, first in _equal_rows(begin, end):
        calls.extend(_Cover(rows, begin[first], end[first], intervals).calls())
    return tuple(calls)


def with_intervals_on(calls: tuple[BlockCall, ...], device: torch.device) -> tuple[BlockCall, ...]:
    """Return `calls` with their ranges of visible keys (`seen`) copied to `device`, asynchronously."""
    intervals = {id(call.seen): call.seen for call in calls if isinstance(call.seen, Tensor)}
    copies = {key: sent(one, device) for key, one in intervals.items()}
    return tuple(replace(call, seen=copies.get(id(call.seen), call.seen)) for call in calls)


def _equal_rows(begin: Indices, end: Indices) -> Iterator[tuple[slice, int]]:
    """Yield slices of consecutive rows with equal indices, and the first row of each."""
    differs = ((begin[1:] != begin[:-1]) | (end[1:] != end[:-1])).any(1)
    starts = [0, *(np.flatnonzero(differs) + 1).tolist()]
    if len(starts) == 1:
        yield slice(None), 0
        return
    for start, stop in zip(starts, [*starts[1:], len(begin)], strict=True):
        yield slice(start, stop), start


class _Cover:
    """The calls for the rows of a slice, whose queries all see the same keys."""

    def __init__(self, rows: slice, begin: Indices, end: Indices, intervals: dict[bytes, Tensor]) -> None:
        """`begin`, `end`: `[n]`, indices of the keys that each query sees; `intervals`: those made so far."""
        self.rows, self.begin, self.end, self.intervals = rows, begin, end, intervals

    def calls(self) -> Iterator[BlockCall]:
        """Yield the kernel calls for runs of queries that see similar keys; short runs share calls."""
        starts = np.flatnonzero(_breaks(self.begin, self.end))
        stops = np.append(starts[1:], len(self.begin))
        short = stops - starts < SHORT
        # A short part joins a short part before it, unless many keys lie between those that the two see.
        near = self.begin[starts[1:]] - self.end[starts[1:] - 1] <= SHORT
        first = np.flatnonzero(np.append(True, ~(short[1:] & short[:-1] & near)))
        after = np.append(first[1:], len(starts))
        for one, other in zip(first.tolist(), after.tolist(), strict=True):
            if other - one == 1:
                yield from self._part(int(starts[one]), int(stops[one]))
            else:
                yield from self._tiles(starts[one:other], int(stops[other - 1]))

    def _tiles(self, starts: Indices, stop: int) -> Iterator[BlockCall]:
        """Yield the calls for neighbouring parts, which begin at `starts`."""
        for tile in range(int(starts[0]), stop, TILE):
            begin, end = self.begin[tile : min(tile + TILE, stop)], self.end[tile : min(tile + TILE, stop)]
            seeing = np.flatnonzero(begin < end)
            if not len(seeing):
                continue
            first, after = tile + int(seeing[0]), tile + int(seeing[-1]) + 1
            if np.searchsorted(starts, first, "right") == np.searchsorted(starts, after):
                yield from self._part(first, after)
            else:
                yield from self._masked(first, after)

    def _part(self, start: int, stop: int) -> Iterator[BlockCall]:
        """Yield the calls for queries of one part: at most two, without a mask."""
        first, common = int(self.begin[start]), int(self.end[start])
        if first == common:
            return
        after = int(self.end[stop - 1])
        common -= common < after  # the diagonal begins at its last key
        if first < common:
            yield BlockCall(self.rows, slice(start, stop), slice(first, common), "full")
        if common < after:
            yield BlockCall(self.rows, slice(start, stop), slice(common, after), "causal")

    def _masked(self, start: int, stop: int) -> Iterator[BlockCall]:
        """Yield a kernel call with a mask, after one without for neighbouring keys that all queries see."""
        begin, end = self.begin[start:stop], self.end[start:stop]
        first, after = int(begin[0]), int(end[-1])
        common = int(begin[-1]), int(end[0])
        if common[1] - common[0] >= TILE and (first == common[0] or after == common[1]):
            yield BlockCall(self.rows, slice(start, stop), slice(*common), "full")
            first, after = (common[1], after) if first == common[0] else (first, common[0])
        if first < after:
            both = np.stack([begin, end]).clip(first, after) - first
            yield BlockCall(self.rows, slice(start, stop), slice(first, after), self._interval(both))

    def _interval(self, both: Indices) -> Tensor:
        key = both.tobytes()
        if key not in self.intervals:
            self.intervals[key] = torch.from_numpy(both.astype(np.int32))
        return self.intervals[key]


def _breaks(begin: Indices, end: Indices) -> NDArray[np.bool_]:
    """Return for each query, `[n]`, whether it begins a new part.

    Within a part all queries see the same first key; each sees one key more than the query before it, until
    they all see the same keys. Queries that see nothing are a part.
    """
    nothing = begin == end
    same_first = ~(nothing[1:] | nothing[:-1]) & (begin[1:] == begin[:-1])
    growth = end[1:] - end[:-1]
    constant, grows = same_first & (growth == 0), same_first & (growth == 1)
    grows[1:] &= ~constant[:-1]
    return np.append(True, ~(constant | grows | (nothing[1:] & nothing[:-1])))
