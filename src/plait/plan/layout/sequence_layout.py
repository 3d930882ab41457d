"""Context parallelism's division of a sequence: which global positions each rank of `cp` holds.

Of 12 positions on 2 ranks, with two chunks, every second, or consecutive positions a rank:

    zigzag   0 1 2 . . . . . . 9 10 11     striped   0 . 2 . 4 . 6 . 8 . 10 .     contiguous   0 1 2 3 4 5
             . . . 3 4 5 6 7 8 . .  .                . 1 . 3 . 5 . 7 . 9 .  11                 6 7 8 9 10 11

In causal attention a position sees those before it. Zigzag (Zhu 2023, "ring-flash-attention") and striped
(Brandon et al. 2023, arXiv:2311.09431) give all ranks equally many pairs; contiguous gives the last rank the
most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from plait.plan.layout.layout import divide
from plait.plan.plan import ContextLayout


@dataclass(frozen=True)
class SequenceLayout:
    """The global positions of a sequence that each rank holds, ascending; each position on one rank."""

    length: int
    """Of the whole sequence."""
    ranges: tuple[tuple[range, ...], ...]
    """By rank: its positions."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    def size(self, rank: int) -> int:
        """Return the number of positions of a rank."""
        return sum(map(len, self.ranges[rank]))

    def positions(self, rank: int) -> Tensor:
        """Return the positions of the whole sequence that a rank holds: int64 `[size(rank)]`, on the CPU."""
        none = np.empty(0, dtype=np.int64)
        each = [np.arange(one.start, one.stop, one.step) for one in self.ranges[rank]]
        return torch.from_numpy(np.concatenate([none, *each]))

    def cut(self, whole: Tensor, rank: int, dim: int = 1, *, out: Tensor | None = None) -> Tensor:
        """Return the elements of `whole` at a rank's positions along `dim`, in `out` or as a new tensor."""
        found = [_at(whole, one, dim) for one in self.ranges[rank]] or [whole.narrow(dim, 0, 0)]
        return torch.cat(found, dim, out=out)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the whole tensor, given each rank's part of it along `dim`: inverse of `cut`."""
        shape = list(parts[0].shape)
        shape[dim] = self.length
        whole = parts[0].new_empty(shape)
        for ranges, part in zip(self.ranges, parts, strict=True):
            each = torch.split(part, [len(one) for one in ranges], dim) if ranges else ()
            for one, values in zip(ranges, each, strict=True):
                _at(whole, one, dim).copy_(values)
        return whole


def parts_of(ranges: Sequence[range], indices: slice) -> tuple[range, ...]:
    """Return the elements of concatenated `ranges` whose indices are in `indices`, as ranges."""
    start, stop, _ = indices.indices(sum(map(len, ranges)))
    found, first = [], 0
    for one in ranges:
        found.append(one[max(start - first, 0) : max(stop - first, 0)])
        first += len(one)
    return tuple(one for one in found if one)


@lru_cache(maxsize=64)  # of zigzag's chunks on 64 ranks half a millisecond
def sequence_layout(length: int, ranks: int, kind: ContextLayout) -> SequenceLayout:
    """Return the layout of a sequence of any `length` over `ranks`; later ranks may hold no position."""
    if kind == "striped":
        each: tuple[tuple[range, ...], ...] = tuple((range(rank, length, ranks),) for rank in range(ranks))
    elif kind == "contiguous":
        each = tuple((one,) for one in divide(length, ranks))
    else:
        each = tuple(_zigzag(length, ranks))
    return SequenceLayout(length, tuple(tuple(one for one in held if one) for held in each))


def _zigzag(length: int, ranks: int) -> Iterator[tuple[range, ...]]:
    """Yield each rank's positions: the first and the last chunk that the ranks before do not hold.

    Where the length does not divide into equal chunks, of the sizes that fit those are chosen whose queries
    see the most equal number of keys: for 64 positions a rank or more, on up to 8 ranks, a rank's number is
    at most 1 % above the mean.
    """
    first, stop = 0, length
    for left in range(ranks, 1, -1):
        size, keys = (stop - first) / left, (_keys(first, stop)) / left
        low = int(size // 2)
        chunks = [
            (
                abs(_keys(first, first + head) + _keys(stop - tail, stop) - keys),
                abs(head + tail - size),
                head,
                tail,
            )
            for head, tail in product(range(max(0, low - 1), low + 3), repeat=2)
            if abs(head + tail - size) < 1.5 and head + tail <= stop - first
        ]
        *_, head, tail = min(chunks)
        yield _joined(range(first, first + head), range(stop - tail, stop))
        first, stop = first + head, stop - tail
    yield (range(first, stop),)


def _keys(first: int, stop: int) -> int:
    """Return the number of keys that causal queries at positions `first … stop - 1` see together."""
    return (stop * (stop + 1) - first * (first + 1)) // 2


def _at(whole: Tensor, positions: range, dim: int) -> Tensor:
    """Return a view of the elements of `whole` at some positions along `dim`."""
    return whole[(slice(None),) * dim + (slice(positions.start, positions.stop, positions.step),)]


def _joined(first: range, second: range) -> tuple[range, ...]:
    """Return two ranges as one where the second follows the first."""
    return (range(first.start, second.stop),) if first.stop == second.start else (first, second)
