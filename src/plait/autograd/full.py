"""The whole of a tensor that ranks hold pieces of."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.autograd.redistribution import redistribute
from plait.comm.grid import GridMesh
from plait.layout import Layout, Placement, Shard


@torch.no_grad()
def full_tensor(piece: Tensor, layout: Layout, mesh: GridMesh) -> Tensor:
    """Return the tensor of `layout.shape` that `piece` is this rank's piece of, without a gradient.

    Every rank along the axes of the layout calls it and gets all of it; where the piece is all of it already,
    that itself. Communication: as `redistribute` to what is replicated, over each axis that cuts.
    """
    axes = dict(zip(layout.axes, layout.degrees, strict=True))
    if layout.blocked_dim is None:
        return redistribute(piece.detach(), layout, Layout(layout.shape, axes), mesh)
    apart = _with_blocks_as_dim(layout)
    where = tuple(mesh.index(axis) for axis in layout.axes)
    pieces = piece.detach().reshape(apart.local_shape(where))
    return redistribute(pieces, apart, Layout(apart.shape, axes), mesh).reshape(layout.shape)


def _with_blocks_as_dim(layout: Layout) -> Layout:
    """The same pieces of a tensor whose blocks are a dim of their own, in front of that which is cut."""
    dim, placements, blocks = layout.blocked_dim, dict[str, Placement](), 1
    assert dim is not None
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        placements[axis] = placement
        if isinstance(placement, Shard):
            blocks = max(blocks, placement.blocks)
            placements[axis] = Shard(placement.dim + (placement.dim >= dim), placement.copies)
    shape = *layout.shape[:dim], blocks, layout.shape[dim] // blocks, *layout.shape[dim + 1 :]
    return Layout(shape, dict(zip(layout.axes, layout.degrees, strict=True)), placements)
