"""A rank's piece as boxes of the global tensor, which any file format can describe.

A piece that is cut at any elements is at most three boxes of a matrix (the end of a row, whole rows, the
beginning of a row), and of a tensor of more dims two more for each:

    a a a a a a        . . . . 1 1
    a a a a a a        2 2 2 2 2 2
    a a a a a a        2 2 2 2 2 2
    a a a a a a        3 3 3 . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from plait.layout.layout import Box, Layout


@dataclass(frozen=True)
class PieceBox:
    """A box of the global tensor that a rank holds, and where it lies in the rank's piece."""

    box: Box
    start: int
    """Elements of the piece, in row-major order, before the block of `sizes`."""
    sizes: tuple[int, ...]
    """Of a block of the piece."""
    within: tuple[slice, ...]
    """Which part of that block it is: all of it, but where a dim is cut block by block."""

    def view_of(self, piece: Tensor) -> Tensor:
        """The part of a contiguous `piece`, in the box's shape: a view, to be read or written."""
        flat = piece.view(-1)[self.start : self.start + prod(self.sizes)]
        return flat.view(self.sizes)[self.within]


def piece_boxes(layout: Layout, where: Sequence[int] | Mapping[str, int]) -> tuple[PieceBox, ...]:
    """What the rank at a coordinate holds, as disjoint boxes that are not empty."""
    sizes, interval = layout.sizes(where), layout.interval(where)
    elements = range(prod(sizes)) if interval is None else interval
    found: list[PieceBox] = []
    start = 0
    for block in _blocks(sizes, elements.start, elements.stop):
        found.extend(_placed(layout.boxes(where), layout.blocked_dim, block, start))
        start += prod(block.sizes)
    return tuple(found)


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor have in common; None: nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index that takes `box` out of a tensor that holds `outer`."""
    starts = (a - b for a, b in zip(box.offsets, outer.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, box.sizes, strict=True))


def is_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes make up a tensor of that shape: inside of it, disjoint, and all of it."""
    if not all(_fits(box, shape) for box in boxes) or sum(prod(box.sizes) for box in boxes) != prod(shape):
        return False
    filled = [box for box in boxes if prod(box.sizes)]
    # Along the dim with the most cuts: a box is held against those alone that it meets there.
    dim = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in filled}), default=None)
    if dim is None:
        return True
    near: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offsets[dim]):
        near = [other for other in near if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        if any(intersection(box, other) is not None for other in near):
            return False
        near.append(box)
    return True


def _fits(box: Box, shape: Sequence[int]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    spans = zip(box.offsets, box.sizes, shape, strict=True)
    return all(start >= 0 and size >= 0 and start + size <= whole for start, size, whole in spans)


def _blocks(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements `start … stop` of a tensor of these sizes as boxes, in row-major order."""
    if start >= stop:
        return
    if len(sizes) <= 1:
        yield Box((start,), (stop - start,)) if sizes else Box((), ())
        return
    row = prod(sizes[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # it begins and ends inside of one row
        yield from _within(sizes, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _within(sizes, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:]))
    if last * row < stop:
        yield from _within(sizes, last, 0, stop - last * row)


def _within(sizes: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """Elements of one row."""
    for box in _blocks(sizes[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


def _placed(held: Sequence[Box], blocked: int | None, block: Box, start: int) -> Iterator[PieceBox]:
    """A box of what a rank's shards leave, as boxes of the global tensor. `held`: those that are joined."""
    whole = tuple(slice(0, size) for size in block.sizes)
    if blocked is None or len(held) == 1:
        yield PieceBox(_shifted(block, held[0].offsets), start, block.sizes, whole)
        return
    each = held[0].sizes[blocked]
    for number, home in enumerate(held):
        before = tuple(number * each * (dim == blocked) for dim in range(len(block.sizes)))
        common = intersection(block, Box(before, home.sizes))
        if common is not None:
            moved = tuple(to - from_ for to, from_ in zip(home.offsets, before, strict=True))
            yield PieceBox(_shifted(common, moved), start, block.sizes, slices_within(common, block))


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(offset + step for offset, step in zip(box.offsets, by, strict=True)), box.sizes)
