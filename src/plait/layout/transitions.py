"""From one layout to another: which collectives, along which axes, in which order.

A move changes the placement along one axis:

    from                to                   by
    Replicate           Shard, Flat          cut              nothing is sent
    Replicate, Shard    Partial              summand          nothing is sent: zeros where others have it
    Shard, Flat         Replicate            all_gather
    Partial             Replicate            all_reduce
    Partial             Shard, Flat          reduce_scatter
    Shard               another Shard        all_to_all

Cuts of one dim are nested, the outermost axis first, and a flat one lies in all of them. So an axis moves to
or from a cut only while no axis cuts what its pieces are cut into; what stands in the way is gathered before,
and cut again after. Among the orders that are left the one is taken that sends the fewest elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import prod
from typing import Literal

from plait.errors import LayoutError
from plait.layout.layout import Flat, Layout, Partial, Placement, Replicate, Shard

By = Literal["cut", "summand", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
Cost = tuple[float, int]
"""Elements that a rank sends, and moves."""


@dataclass(frozen=True)
class Move:
    """One change of placement; `source` and `target` differ along `axis` only."""

    axis: str
    by: By
    source: Layout
    target: Layout


@lru_cache(maxsize=1024)
def moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The cheapest moves from `source` to `target`, the same on every rank.

    Raises `LayoutError` unless both lay the same shape over the same axes, and cut no dim block by block.
    """
    if source.blocked_dim is not None or target.blocked_dim is not None:
        raise LayoutError(
            f"{source} cannot become {target} where a dim is cut block by block: give that dim as two, its "
            "blocks and what is cut of each."
        )
    if (source.shape, source.axes, source.degrees) != (target.shape, target.axes, target.degrees):
        raise LayoutError(
            f"{source} cannot become {target}: give layouts of one shape over the same axes, in one order."
        )
    # Dijkstra: of what is reached, the cheapest goes on. Its number decides between equals.
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
    raise AssertionError("all can be gathered, and cut again")


def _next(layout: Layout, source: Layout, target: Layout) -> Iterator[Move]:
    """What can be moved now: an axis goes to where it ends, to where it began, or to be whole."""
    axes = dict(zip(layout.axes, layout.degrees, strict=True))
    for place, axis in enumerate(layout.axes):
        now = layout.placements[place]
        for then in dict.fromkeys((target.placements[place], source.placements[place], Replicate())):
            by = _by(now, then)
            if by is not None and _is_free(layout.placements, place, then, target.placements):
                placements = dict(zip(layout.axes, layout.placements, strict=True)) | {axis: then}
                yield Move(axis, by, layout, Layout(layout.shape, axes, placements))


def _by(now: Placement, then: Placement) -> By | None:
    """How a placement becomes another; None for the same, and for what goes through `Replicate`."""
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
    """Whether nothing is cut out of the pieces that change when the axis at `place` moves."""
    others = [other for index, other in enumerate(placements) if index != place]
    dims = {one.dim for one in (placements[place], then) if isinstance(one, Shard)}
    if (dims or isinstance(then, Flat)) and any(isinstance(other, Flat) for other in others):
        return False
    if any(isinstance(inner, Shard) and inner.dim in dims for inner in placements[place + 1 :]):
        return False
    if isinstance(then, Flat):  # its bounds are made for what the shards leave in the end
        left = [other for index, other in enumerate(final) if index != place]
        return then == final[place] and all(
            now == last for now, last in zip(others, left, strict=True) if Shard in (type(now), type(last))
        )
    return True


def _sent(move: Move) -> float:
    """Elements that leave a rank, by the best algorithms for each collective; for the largest piece."""
    ranks, held = move.source.degrees[move.source.axes.index(move.axis)], _largest(move.source)
    shares = {"all_gather": ranks - 1, "all_reduce": 2 * (ranks - 1) / ranks}
    exchanged = (ranks - 1) / ranks
    return 0.0 if move.by in ("cut", "summand") else held * shares.get(move.by, exchanged)


def _largest(layout: Layout) -> int:
    """Elements of the largest piece."""
    first = [0] * len(layout.axes)
    elements = prod(layout.region(first).sizes)
    for place, placement in enumerate(layout.placements):
        if isinstance(placement, Flat):
            pieces = ([*first[:place], index, *first[place + 1 :]] for index in range(layout.degrees[place]))
            return max(len(layout.interval(piece) or ()) for piece in pieces)
    return elements
