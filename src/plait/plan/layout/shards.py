"""Shards of a global tensor: `shard` cuts it, `assemble` joins it, boxes describe a shard for any file.

A `Flat` shard of a matrix is at most three boxes (the end of a row, whole rows, the beginning of a row); each
further dim of the tensor adds at most two:

    a a a a a a        . . . . 1 1
    a a a a a a        2 2 2 2 2 2
    a a a a a a        2 2 2 2 2 2
    a a a a a a        3 3 3 . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from plait.errors import LayoutError
from plait.plan.layout.layout import Box, Coordinate, Layout, Partial


@dataclass(frozen=True)
class ShardBox:
    """A box (a range per dim) of the global tensor, and its position in the rank's local shard."""

    box: Box
    start: int
    """First element, in row-major order, of the block of the local shard that contains the box."""
    sizes: tuple[int, ...]
    """Shape of that block."""
    within: tuple[slice, ...]
    """Index of the box in that block: all of it, except where a dim is sharded block by block."""

    def view_of(self, local: Tensor) -> Tensor:
        """Return a view of the contiguous `local` that holds this box."""
        flat = local.view(-1)[self.start : self.start + prod(self.sizes)]
        return flat.view(self.sizes)[self.within]


def shard_boxes(layout: Layout, where: Sequence[int] | Mapping[str, int]) -> tuple[ShardBox, ...]:
    """Return the disjoint, non-empty boxes of the global tensor that the rank at a coordinate holds."""
    sizes, interval = layout.sizes(where), layout.interval(where)
    elements = range(prod(sizes)) if interval is None else interval
    found: list[ShardBox] = []
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


def _global_boxes(held: Sequence[Box], blocked: int | None, block: Box, start: int) -> Iterator[ShardBox]:
    """Yield the `ShardBox`es that make up `block` of the local shard, the concatenation of boxes `held`."""
    if blocked is None or len(held) == 1:
        yield ShardBox(_shifted(block, held[0].offsets), start, block.sizes, full_box(block.sizes).slices)
        return
    rows = 0
    for home in held:
        before = tuple(rows * (dim == blocked) for dim in range(len(block.sizes)))
        rows += home.sizes[blocked]
        common = intersection(block, Box(before, home.sizes))
        if common.numel:
            shift = tuple(to - from_ for to, from_ in zip(home.offsets, before, strict=True))
            yield ShardBox(_shifted(common, shift), start, block.sizes, slices_within(common, block))


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(offset + step for offset, step in zip(box.offsets, by, strict=True)), box.sizes)


def shard(tensor: Tensor, layout: Layout, where: Sequence[int] | Mapping[str, int]) -> Tensor:
    """Return the shard of the global `tensor` (of `layout.shape`) that the rank at this coordinate holds.

    A contiguous, detached copy, so that the global tensor can be freed. Along a `Partial` axis the first rank
    holds the value and the others zeros. Raises `LayoutError` if the tensor has another shape.
    """
    if tuple(tensor.shape) != layout.shape:
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be sharded by {layout}: shapes must agree."
        )
    shape, parts = _shape_and_boxes(layout, layout.coordinate(where))
    local = tensor.new_zeros(shape)
    for part in parts:
        part.view_of(local).copy_(tensor.detach()[part.box.slices])
    return local


@lru_cache(maxsize=4096)  # a verification takes the same shards of values and gradients hundreds of times
def _shape_and_boxes(layout: Layout, coordinate: Coordinate) -> tuple[tuple[int, ...], tuple[ShardBox, ...]]:
    """Return a shard's shape and the boxes to copy into it: none for a later rank along a `Partial` axis."""
    is_zero = _is_later_summand(layout, coordinate)
    return layout.local_shape(coordinate), () if is_zero else shard_boxes(layout, coordinate)


def assemble(
    shards: Mapping[Coordinate, Tensor] | Sequence[Tensor], layout: Layout, *, check_replicas: bool = True
) -> Tensor:
    """Return the global tensor (of `layout.shape`) assembled from the shards of all coordinates.

    `shards`: by coordinate, or in row-major order. `Partial` summands are added in that order, in their own
    dtype. The result is new, detached, on the first shard's device. Raises `LayoutError` for a missing or
    surplus shard, for another shape or dtype, and for replicas that are not equal bit by bit (with
    `check_replicas=False` the first replica is taken).
    """
    shards = _by_coordinate(shards, layout)
    first = next(iter(shards.values()))
    whole = torch.empty(layout.shape, dtype=first.dtype, device=first.device)
    for coordinate, local in shards.items():
        shape, original = layout.local_shape(coordinate), layout.replicas(coordinate)[0]
        if tuple(local.shape) != shape or local.dtype != first.dtype:
            raise LayoutError(
                f"the shard at {_name(layout, coordinate)} is {tuple(local.shape)} in {local.dtype}, where "
                f"{layout} has {shape} in {first.dtype}: give the shard that shard() cuts there."
            )
        if coordinate == original:
            contiguous, adds = local.contiguous(), _is_later_summand(layout, coordinate)
            for part in shard_boxes(layout, coordinate):
                target, values = whole[part.box.slices], part.view_of(contiguous)
                target.copy_(target + values.to(whole.device) if adds else values)
        elif check_replicas and not _same_bits(local, shards[original]):
            raise LayoutError(
                f"the replicas at {_name(layout, original)} and {_name(layout, coordinate)} of {layout} "
                "differ: find where they diverged, or take the first with check_replicas=False."
            )
    return whole


def _by_coordinate(
    shards: Mapping[Coordinate, Tensor] | Sequence[Tensor], layout: Layout
) -> dict[Coordinate, Tensor]:
    """Return the detached shards in row-major order. Raises LayoutError unless each coordinate has one."""
    coordinates = list(layout.coordinates())
    if not isinstance(shards, Mapping):
        if len(shards) != len(coordinates):
            raise LayoutError(
                f"{len(shards)} shards cannot make {layout}: give one per rank, {len(coordinates)} in all."
            )
        shards = dict(zip(coordinates, shards, strict=True))
    wrong, fault = [c for c in coordinates if c not in shards], "missing"
    if not wrong and len(shards) > len(coordinates):
        wrong, fault = list(shards.keys() - set(coordinates)), "not one of its coordinates"
    if wrong:
        raise LayoutError(f"the shard at {wrong[0]} of {layout} is {fault}: give one shard per coordinate.")
    return {coordinate: shards[coordinate].detach() for coordinate in coordinates}


def _is_later_summand(layout: Layout, coordinate: Coordinate) -> bool:
    """Return whether a coordinate is not the first along a `Partial` axis."""
    return any(i > 0 and isinstance(p, Partial) for i, p in zip(coordinate, layout.placements, strict=True))


def _name(layout: Layout, coordinate: Coordinate) -> str:
    return "(" + ", ".join(f"{axis}={i}" for axis, i in zip(layout.axes, coordinate, strict=True)) + ")"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes and bytes are equal; works for NaN and for dtypes that torch cannot compare."""
    a_bytes, b_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(a_bytes, b_bytes.to(a.device))
