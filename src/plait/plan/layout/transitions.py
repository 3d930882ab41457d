"""Changes of layout: `moves`, the collectives that redistribute a tensor, and `reshape`, without any.

A move changes the placement along one axis:

    from                to                   by
    Replicate           Shard, Flat          cut              local: each rank keeps its shard
    Replicate, Shard    Partial              summand          local: zeros on all ranks but the owner
    Shard, Flat         Replicate            all_gather
    Partial             Replicate            all_reduce
    Partial             Shard, Flat          reduce_scatter
    Shard               another Shard        all_to_all

Axes that shard one dim are nested, the outermost first, and `Flat` axes are nested in all of them. An axis
can change its placement only while no inner axis divides its shards: inner axes are gathered before, and
sharded again after. Of the possible orders, the one that sends the fewest elements is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from math import prod
from typing import Literal

from plait.errors import LayoutError
from plait.plan.layout.layout import Flat, Layout, Partial, Placement, Replicate, Shard

By = Literal["cut", "summand", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
Cost = tuple[float, int]
"""Number of elements that a rank sends, and number of moves."""


@dataclass(frozen=True)
class Move:
    """One step of a redistribution: another placement along `axis`, from layout `source` to `target`."""

    axis: str
    by: By
    source: Layout
    target: Layout


@lru_cache(maxsize=1024)
def moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    """Return the cheapest sequence of moves from layout `source` to `target`, the same on every rank.

    Raises `LayoutError` unless both have the same shape and axes, and shard no dim block by block.
    """
    if source.blocked_dim is not None or target.blocked_dim is not None:
        raise LayoutError(
            f"{source} cannot become {target} where a dim is sharded block by block: give that dim as two, "
            "the blocks and the rows of a block."
        )
    if (source.shape, source.axes, source.degrees) != (target.shape, target.axes, target.degrees):
        raise LayoutError(
            f"{source} cannot become {target}: give layouts of one shape over the same axes, in one order."
        )
    # Dijkstra's algorithm; the number of an entry decides between equal costs.
    waiting: list[tuple[Cost, int, Layout, tuple[Move, ...]]] = [((0.0, 0), 0, source, ())]
    done, number = set[Layout](), 0
    while waiting:
        (elements, count), _, layout, path = heappop(waiting)
        if layout == target:
            return path
        if layout not in done:
            done.add(layout)
            for move in _next(layout, source, target):
                number += 1
                cost = elements + _sent(move), count + 1
                heappush(waiting, (cost, number, move.target, (*path, move)))
    raise AssertionError("every layout can be gathered, and sharded again")


def _next(layout: Layout, source: Layout, target: Layout) -> Iterator[Move]:
    """Yield the possible next moves: one axis to its placement in `target`, in `source`, or `Replicate`."""
    for place, axis in enumerate(layout.axes):
        now = layout.placements[place]
        for then in dict.fromkeys((target.placements[place], source.placements[place], Replicate())):
            by = _by(now, then)
            if by is not None and _is_free(layout.placements, place, then, target.placements):
                placements = layout.axis_placements | {axis: then}
                yield Move(axis, by, layout, Layout(layout.shape, layout.axis_degrees, placements))


def _by(now: Placement, then: Placement) -> By | None:
    """Return the operation that changes placement `now` to `then`; None if none does so in one step."""
    if now == then:
        return None
    if isinstance(then, Replicate):
        return "all_reduce" if isinstance(now, Partial) else "all_gather"
    if isinstance(then, Partial):
        return "summand"
    if isinstance(now, Replicate):
        return "cut"
    if isinstance(now, Partial):
        return "reduce_scatter"
    return "all_to_all" if isinstance(now, Shard) and isinstance(then, Shard) else None


def _is_free(
    placements: tuple[Placement, ...], place: int, then: Placement, final: tuple[Placement, ...]
) -> bool:
    """Return whether the axis at index `place` can change to `then` before any other axis changes."""
    others = [other for index, other in enumerate(placements) if index != place]
    dims = {one.dim for one in (placements[place], then) if isinstance(one, Shard)}
    if dims and any(isinstance(other, Flat) for other in others):
        return False
    changes_flat = Flat in (type(placements[place]), type(then))
    if changes_flat and any(isinstance(inner, Flat) for inner in placements[place + 1 :]):
        return False
    if any(isinstance(inner, Shard) and inner.dim in dims for inner in placements[place + 1 :]):
        return False
    if isinstance(then, Flat):  # its bounds refer to what the final shards leave
        left = [other for index, other in enumerate(final) if index != place]
        settled = zip(others, left, strict=True)
        outer = zip(placements[:place], final[:place], strict=True)
        return (
            then == final[place]
            and all(now == last for now, last in settled if Shard in (type(now), type(last)))
            and all(now == last for now, last in outer if Flat in (type(now), type(last)))
        )
    return True


def _sent(move: Move) -> float:
    """Return the number of elements that a rank sends for a move, by the collective's best algorithm."""
    ranks, held = move.source.degrees[move.source.axes.index(move.axis)], _largest(move.source)
    shares = {"all_gather": ranks - 1, "all_reduce": 2 * (ranks - 1) / ranks}
    exchanged = (ranks - 1) / ranks
    return 0.0 if move.by in ("cut", "summand") else held * shares.get(move.by, exchanged)


def _largest(layout: Layout) -> int:
    """Return the number of elements of the largest shard of the layout."""
    first = [0] * len(layout.axes)
    if layout.interval(first) is None:
        return layout.region(first).numel
    flat = (
        range(degree if isinstance(placement, Flat) else 1)
        for degree, placement in zip(layout.degrees, layout.placements, strict=True)
    )
    return max(len(layout.interval(place) or ()) for place in product(*flat))


def reshape(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout under which each rank's shard of `tensor.reshape(shape)` is its own shard, reshaped.

    A sharded dim may stay, be split (the shard moves to the leading factor) or be merged (as the outermost of
    the merged dims), if every rank keeps its elements. Raises LayoutError where data would have to move.
    """
    shape = tuple(shape)
    if prod(shape) != prod(layout.shape) or any(size < 0 for size in shape):
        raise LayoutError(f"cannot reshape {layout.shape} to {shape}: both must have as many elements.")
    placements, degrees = layout.axis_placements, layout.axis_degrees
    shards = {axis: placement for axis, placement in placements.items() if isinstance(placement, Shard)}
    parts = {axis: degrees[axis] // placement.copies for axis, placement in shards.items()}
    for before, after in _groups(layout.shape, shape):
        dims = {axis: placement.dim for axis, placement in shards.items() if placement.dim in before}
        if dims:
            blocked = any(shards[axis].is_blocked for axis in dims)
            if blocked and not len(before) == len(after) == 1:
                raise LayoutError(
                    f"cannot reshape {layout.shape} to {shape} without moving data while a dim of several "
                    "blocks is sharded: keep that dim, or gather it first."
                )
            moved = _moved(layout.shape, shape, before, after, parts, dims)
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
        f"axis {axis!r} ({degrees[axis]} shards) shards dim {dim}" for axis, dim in dims.items()
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
