"""`reshape`: the layout of a reshaped tensor whose pieces are reshaped in place, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from plait.errors import LayoutError
from plait.plan.layout.layout import Layout, Shard


def reshape(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout under which each rank's piece of `tensor.reshape(shape)` is its own piece, reshaped.

    A sharded dim may stay, be split (the shard moves to the leading factor) or be merged (as the outermost of
    the merged dims), if every rank keeps its elements. Raises LayoutError where data would have to move.
    """
    shape = tuple(shape)
    if prod(shape) != prod(layout.shape) or any(size < 0 for size in shape):
        raise LayoutError(f"cannot reshape {layout.shape} to {shape}: both must have as many elements.")
    placements, degrees = layout.axis_placements, layout.axis_degrees
    shards = {axis: placement for axis, placement in placements.items() if isinstance(placement, Shard)}
    pieces = {axis: degrees[axis] // placement.copies for axis, placement in shards.items()}
    for before, after in _groups(layout.shape, shape):
        dims = {axis: placement.dim for axis, placement in shards.items() if placement.dim in before}
        if dims:
            blocked = any(shards[axis].is_blocked for axis in dims)
            if blocked and not len(before) == len(after) == 1:
                raise LayoutError(
                    f"cannot reshape {layout.shape} to {shape} without moving data while a dim of several "
                    "blocks is sharded: keep that dim, or gather it first."
                )
            moved = _moved(layout.shape, shape, before, after, pieces, dims)
            placements |= {axis: replace(shards[axis], dim=dim) for axis, dim in moved.items()}
    return Layout(shape, degrees, placements)


def _moved(
    old: tuple[int, ...],
    new: tuple[int, ...],
    before: range,
    after: range,
    degrees: Mapping[str, int],
    dims: Mapping[str, int],
) -> dict[str, int]:
    """Return the new dim (of `after`) that each mesh axis shards, such that every rank keeps its elements."""
    held = _intervals(old, before, degrees, dims)
    # Dims of size 1 are tried last: a shard moves there only from another dim of size 1.
    for choice in product(sorted(after, key=lambda dim: new[dim] == 1), repeat=len(dims)):
        candidate = dict(zip(dims, choice, strict=True))
        if held is not None and _intervals(new, after, degrees, candidate) == held:
            return candidate
    cuts = " and ".join(
        f"axis {axis!r} ({degrees[axis]} pieces) shards dim {dim}" for axis, dim in dims.items()
    )
    raise LayoutError(
        f"cannot reshape {old} to {new} without moving data while {cuts}: keep that dim, make it the "
        "outermost of those split or merged with a size that divides, or gather it first."
    )


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[range, range]]:
    """Yield the smallest pairs of old and new dims of equal size: (2, 3, 4) to (6, 4) has two such pairs."""
    i = j = 0
    while i < len(old) or j < len(new):
        end_i, end_j = min(i + 1, len(old)), min(j + 1, len(new))
        while (left := prod(old[i:end_i])) != (right := prod(new[j:end_j])):
            if left < right and end_i < len(old):
                end_i += 1
            elif left > right and end_j < len(new):
                end_j += 1
            else:  # a tensor without elements: the rest is one group
                end_i, end_j = len(old), len(new)
                break
        yield range(i, end_i), range(j, end_j)
        i, j = end_i, end_j


def _intervals(
    shape: tuple[int, ...], group: range, degrees: Mapping[str, int], dims: Mapping[str, int]
) -> list[range] | None:
    """Return each rank's interval of the flattened dims `group`; None if a rank holds no single interval.

    `dims`: the dim that each axis shards.
    """
    sizes = shape[group.start : group.stop]
    axes = {axis: degrees[axis] for axis in dims}
    layout = Layout(sizes, axes, {axis: Shard(dim - group.start) for axis, dim in dims.items()})
    found = []
    for coordinate in layout.coordinates():
        box = layout.box(coordinate)
        first = last = 0
        for size, offset, held in zip(sizes, box.offsets, box.sizes, strict=True):
            first, last = first * size + offset, last * size + offset + held - 1
        interval = range(first, last + 1) if box.numel else range(0)
        if len(interval) != box.numel:
            return None
        found.append(interval)
    return found
