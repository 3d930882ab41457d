"""Splitting of a global tensor into pieces (`shard`) and its reassembly (`assemble`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from plait.errors import LayoutError
from plait.plan.layout.boxes import PieceBox, piece_boxes
from plait.plan.layout.layout import Coordinate, Layout, Partial


def shard(tensor: Tensor, layout: Layout, where: Sequence[int] | Mapping[str, int]) -> Tensor:
    """Return the piece of the global `tensor` (of `layout.shape`) that the rank at this coordinate holds.

    A contiguous, detached copy, so that the global tensor can be freed. Along a `Partial` axis the first rank
    holds the value and the others zeros. Raises `LayoutError` if the tensor has another shape.
    """
    if tuple(tensor.shape) != layout.shape:
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be sharded by {layout}: shapes must agree."
        )
    shape, parts = _shape_and_boxes(layout, layout.coordinate(where))
    piece = tensor.new_zeros(shape)
    for part in parts:
        part.view_of(piece).copy_(tensor.detach()[part.box.slices])
    return piece


@lru_cache(maxsize=4096)  # a verification takes the same pieces of values and gradients hundreds of times
def _shape_and_boxes(layout: Layout, coordinate: Coordinate) -> tuple[tuple[int, ...], tuple[PieceBox, ...]]:
    """Return a piece's shape and the boxes to copy into it: none for a later rank along a `Partial` axis."""
    is_zero = _is_later_summand(layout, coordinate)
    return layout.local_shape(coordinate), () if is_zero else piece_boxes(layout, coordinate)


def assemble(
    pieces: Mapping[Coordinate, Tensor] | Sequence[Tensor], layout: Layout, *, check_replicas: bool = True
) -> Tensor:
    """Return the global tensor (of `layout.shape`) assembled from the pieces of all coordinates.

    `pieces`: by coordinate, or in row-major order. `Partial` summands are added in that order, in their own
    dtype. The result is new, detached, on the first piece's device. Raises `LayoutError` for a missing or
    surplus piece, for another shape or dtype, and for replicas that are not equal bit by bit (with
    `check_replicas=False` the first replica is taken).
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
        if coordinate == original:
            contiguous, adds = piece.contiguous(), _is_later_summand(layout, coordinate)
            for part in piece_boxes(layout, coordinate):
                target, values = whole[part.box.slices], part.view_of(contiguous)
                target.copy_(target + values.to(whole.device) if adds else values)
        elif check_replicas and not _same_bits(piece, pieces[original]):
            raise LayoutError(
                f"the replicas at {_name(layout, original)} and {_name(layout, coordinate)} of {layout} "
                "differ: find where they diverged, or take the first with check_replicas=False."
            )
    return whole


def _by_coordinate(
    pieces: Mapping[Coordinate, Tensor] | Sequence[Tensor], layout: Layout
) -> dict[Coordinate, Tensor]:
    """Return the detached pieces in row-major order. Raises LayoutError unless each coordinate has one."""
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
    """Return whether a coordinate is not the first along a `Partial` axis."""
    return any(i > 0 and isinstance(p, Partial) for i, p in zip(coordinate, layout.placements, strict=True))


def _name(layout: Layout, coordinate: Coordinate) -> str:
    return "(" + ", ".join(f"{axis}={i}" for axis, i in zip(layout.axes, coordinate, strict=True)) + ")"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes and bytes are equal; works for NaN and for dtypes that torch cannot compare."""
    a_bytes, b_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(a_bytes, b_bytes.to(a.device))
