"""Box arithmetic, and a rank's piece as boxes of the global tensor, which any file format can store.

A `Flat` piece of a matrix is at most three boxes (the end of a row, whole rows, the beginning of a row); each
further dim of the tensor adds at most two:

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

from plait.plan.layout.layout import Box, Layout


@dataclass(frozen=True)
class PieceBox:
    """A box (a range per dim) of the global tensor, and its position in the rank's local piece."""

    box: Box
    start: int
    """First element, in row-major order, of the block of the local piece that contains the box."""
    sizes: tuple[int, ...]
    """Shape of that block."""
    within: tuple[slice, ...]
    """Index of the box in that block: all of it, except where a dim is sharded block by block."""

    def view_of(self, piece: Tensor) -> Tensor:
        """Return a view of the contiguous local `piece` that holds this box."""
        flat = piece.view(-1)[self.start : self.start + prod(self.sizes)]
        return flat.view(self.sizes)[self.within]


def piece_boxes(layout: Layout, where: Sequence[int] | Mapping[str, int]) -> tuple[PieceBox, ...]:
    """Return the disjoint, non-empty boxes of the global tensor that the rank at a coordinate holds."""
    sizes, interval = layout.sizes(where), layout.interval(where)
    elements = range(prod(sizes)) if interval is None else interval
    found: list[PieceBox] = []
    start = 0
    for block in _interval_boxes(sizes, elements.start, elements.stop):
        found.extend(_global_boxes(layout.boxes(where), layout.blocked_dim, block, start))
        start += block.numel
    return tuple(found)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(one: Box, other: Box) -> Box:
    """Return the overlap of two boxes of a tensor, with size 0 along dims without an overlap."""
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    ranges = [range(max(a, b), min(a + n, b + m)) for a, n, b, m in pairs]
    return Box(tuple(each.start for each in ranges), tuple(map(len, ranges)))


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor that holds just the box `outer`."""
    starts = (a - b for a, b in zip(box.offsets, outer.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, box.sizes, strict=True))


def is_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes are disjoint and together cover exactly a tensor of this shape."""
    if not all(_fits(box, shape) for box in boxes) or sum(box.numel for box in boxes) != prod(shape):
        return False
    return overlap(boxes) is None


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of a tensor that have elements in common, or None."""
    filled = [box for box in boxes if box.numel]
    dims = range(len(filled[0].sizes) if filled else 0)
    # Sweep along the dim with the most cuts, so that each box is compared with few others.
    dim = max(dims, key=lambda dim: len({box.offsets[dim] for box in filled}), default=None)
    if dim is None:
        return (filled[0], filled[1]) if len(filled) > 1 else None
    near: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offsets[dim]):
        near = [other for other in near if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in near:
            if intersection(box, other).numel:
                return other, box
        near.append(box)
    return None


def _fits(box: Box, shape: Sequence[int]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    spans = zip(box.offsets, box.sizes, shape, strict=True)
    return all(start >= 0 and size >= 0 and start + size <= whole for start, size, whole in spans)


def _interval_boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements `start` to `stop`, in row-major order, of a tensor of these sizes."""
    if start >= stop:
        return
    if len(sizes) <= 1:
        yield Box((start,), (stop - start,)) if sizes else Box((), ())
        return
    row = prod(sizes[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the interval begins and ends inside one row
        yield from _row_boxes(sizes, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row_boxes(sizes, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:]))
    if last * row < stop:
        yield from _row_boxes(sizes, last, 0, stop - last * row)


def _row_boxes(sizes: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements `start` to `stop`, counted within the row, of row `index` of dim 0."""
    for box in _interval_boxes(sizes[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


def _global_boxes(held: Sequence[Box], blocked: int | None, block: Box, start: int) -> Iterator[PieceBox]:
    """Yield the `PieceBox`es that make up `block` of the local piece, the concatenation of boxes `held`."""
    if blocked is None or len(held) == 1:
        yield PieceBox(_shifted(block, held[0].offsets), start, block.sizes, full_box(block.sizes).slices)
        return
    rows = 0
    for home in held:
        before = tuple(rows * (dim == blocked) for dim in range(len(block.sizes)))
        rows += home.sizes[blocked]
        common = intersection(block, Box(before, home.sizes))
        if common.numel:
            shift = tuple(to - from_ for to, from_ in zip(home.offsets, before, strict=True))
            yield PieceBox(_shifted(common, shift), start, block.sizes, slices_within(common, block))


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(offset + step for offset, step in zip(box.offsets, by, strict=True)), box.sizes)
