"""Few kernel calls of attention that compute exactly the pairs of query and key that a mask shows.

From one query to the next both ends of the visible keys only grow. The calls follow this staircase:

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.ranks.accelerator import sent
from plait.tensor.attention.visible_keys import Indices

TILE = 256
"""The largest number of queries of a call with a mask: its keys are those that any of them sees."""


SHORT = 32
"""Parts of fewer queries share a call with a mask: to launch one for each would take longer."""


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
