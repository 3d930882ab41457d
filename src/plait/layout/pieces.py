"""From the global tensor to its pieces and back: `shard` and `assemble` are inverses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.errors import LayoutError
from plait.layout.layout import Coordinate, Layout, Partial


def shard(tensor: Tensor, layout: Layout, where: Sequence[int] | Mapping[str, int]) -> Tensor:
    """The piece of the global `tensor` (of `layout.shape`) that the rank at this coordinate holds.

    A contiguous copy, detached, so that the global tensor can be freed. Along a `Partial` axis the first rank
    holds the value and the others zeros. Raises `LayoutError` if the tensor has another shape.
    """
    if tuple(tensor.shape) != layout.shape:
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be cut by {layout}: shapes must agree."
        )
    coordinate = layout.coordinate(where)
    piece = _held(tensor.detach(), layout, coordinate).clone(memory_format=torch.contiguous_format)
    interval = layout.interval(coordinate)
    if interval is not None:
        kept = piece.view(-1)[interval.start : interval.stop]
        piece = kept.clone().view(layout.local_shape(coordinate))
    return piece.zero_() if _is_later_summand(layout, coordinate) else piece


def assemble(
    pieces: Mapping[Coordinate, Tensor] | Sequence[Tensor], layout: Layout, *, check_replicas: bool = True
) -> Tensor:
    """The global tensor (of `layout.shape`) from the pieces of all coordinates.

    `pieces` go by coordinate, or stand in row-major order; `Partial` summands are added in that order, in
    their own dtype. The result is new, detached, on the first piece's device. Raises `LayoutError` for a
    missing or surplus piece, for another shape or dtype, and for replicas that are not equal bit by bit (with
    `check_replicas=False` the first of them is taken).
    """
    pieces = _by_coordinate(pieces, layout)
    first = next(iter(pieces.values()))
    whole = torch.empty(layout.shape, dtype=first.dtype, device=first.device)
    for coordinate, piece in pieces.items():
        shape, original = layout.local_shape(coordinate), layout.replicas(coordinate)[0]
        if tuple(piece.shape) != shape or piece.dtype != first.dtype:
            raise LayoutError(
                f"the piece at {_name(layout, coordinate)} is {tuple(piece.shape)} in {piece.dtype}, where "
                f"{layout} has {shape} in {first.dtype}: give the piece that shard() cuts there."
            )
        if coordinate != original:
            if check_replicas and not _same_bits(piece, pieces[original]):
                raise LayoutError(
                    f"the replicas at {_name(layout, original)} and {_name(layout, coordinate)} of {layout} "
                    "differ: find where they drifted apart, or take the first with check_replicas=False."
                )
        else:
            region = _held(whole, layout, coordinate)
            _put(piece, region, layout, coordinate)
            _return(region, whole, layout, coordinate)
    return whole


def _held(whole: Tensor, layout: Layout, coordinate: Coordinate) -> Tensor:
    """What the shards leave at a coordinate: a view, or a copy where it is joined of several blocks."""
    boxes = layout.boxes(coordinate)
    if len(boxes) == 1:
        return whole[boxes[0].slices]
    return torch.cat([whole[box.slices] for box in boxes], dim=layout.blocked_dim or 0)


def _return(held: Tensor, whole: Tensor, layout: Layout, coordinate: Coordinate) -> None:
    """Write what `_held` gave back, where it was a copy."""
    boxes = layout.boxes(coordinate)
    if len(boxes) > 1:
        for box, part in zip(boxes, held.chunk(len(boxes), dim=layout.blocked_dim or 0), strict=True):
            whole[box.slices] = part


def _put(piece: Tensor, region: Tensor, layout: Layout, coordinate: Coordinate) -> None:
    """Write a piece into its region of the global tensor, or add a later summand to it."""
    interval = layout.interval(coordinate)
    if _is_later_summand(layout, coordinate):
        before = region.reshape(-1)[interval.start : interval.stop] if interval is not None else region
        piece = before.view(piece.shape) + piece.to(region.device)
    if interval is None:
        region.copy_(piece)
    elif region.is_contiguous():
        region.view(-1)[interval.start : interval.stop] = piece.reshape(-1)
    else:  # through a copy: its elements are no interval of the global tensor's memory
        filled = region.clone(memory_format=torch.contiguous_format)
        filled.view(-1)[interval.start : interval.stop] = piece.reshape(-1)
        region.copy_(filled)


def _by_coordinate(
    pieces: Mapping[Coordinate, Tensor] | Sequence[Tensor], layout: Layout
) -> dict[Coordinate, Tensor]:
    """The detached pieces in row-major order; `LayoutError` unless there is one per coordinate."""
    coordinates = list(layout.coordinates())
    if not isinstance(pieces, Mapping):
        if len(pieces) != len(coordinates):
            raise LayoutError(
                f"{len(pieces)} pieces cannot make {layout}: give one per rank, {len(coordinates)} in all."
            )
        pieces = dict(zip(coordinates, pieces, strict=True))
    wrong, fault = [c for c in coordinates if c not in pieces], "missing"
    if not wrong and len(pieces) > len(coordinates):
        wrong, fault = list(pieces.keys() - set(coordinates)), "not one of its coordinates"
    if wrong:
        raise LayoutError(f"the piece at {wrong[0]} of {layout} is {fault}: give one piece per coordinate.")
    return {coordinate: pieces[coordinate].detach() for coordinate in coordinates}


def _is_later_summand(layout: Layout, coordinate: Coordinate) -> bool:
    """Whether a coordinate stands behind the first along a `Partial` axis."""
    return any(i > 0 and isinstance(p, Partial) for i, p in zip(coordinate, layout.placements, strict=True))


def _name(layout: Layout, coordinate: Coordinate) -> str:
    return "(" + ", ".join(f"{axis}={i}" for axis, i in zip(layout.axes, coordinate, strict=True)) + ")"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of shape and bytes: right for NaN too, and for dtypes that torch cannot compare."""
    a_bytes, b_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(a_bytes, b_bytes.to(a.device))
