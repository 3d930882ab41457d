"""A local tensor and its layout as a `DTensor`, over the groups of the mesh.

    plait                          DTensor
    Replicate()                    Replicate()
    Shard(dim)                     Shard(dim), where `DTensor` gives each rank the same rows
    Flat(bounds)                   Shard(0), where the intervals are the same rows
    Partial()                      Partial()
    anything else                  Replicate(): the shards are gathered along that axis

`DTensor` divides rows as `torch.chunk` does: ten rows over four ranks are 3, 3, 3, 1, where `divide` gives 3,
3, 2, 2. It cannot express copies of heads on neighbouring ranks, blocks, and shards that end inside a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor

from plait.errors import LayoutError
from plait.plan.layout.layout import (
    Box,
    Coordinate,
    Flat,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    divide,
)
from plait.ranks.mesh import GridMesh
from plait.tensor.autograd.redistribution import full_tensor, redistribute

__all__ = ["DTensor", "as_dtensor", "expressible"]


def as_dtensor(tensor: Tensor, layout: Layout, mesh: GridMesh) -> DTensor:
    """Return a tensor's shard under `layout` as a `DTensor`; gathered along axes it cannot express.

    The result has no gradient. Its `DeviceMesh` has the axes of the layout with more than one rank, in their
    order. Where `expressible(layout)` is `layout` it shares the memory of `tensor`; otherwise it is a copy,
    and all ranks along the gathered axes must call this. Communication: as `redistribute` from `layout` to
    `expressible(layout)`. Raises `LayoutError` as `redistribute`, and `MeshError` without an initialised
    world.
    """
    shown = expressible(layout)
    shard = tensor.detach().to(mesh.device)
    if layout.blocked_dim is None:
        local = redistribute(shard, _by_rows(layout), shown, mesh)
    else:
        local = full_tensor(shard, layout, mesh)
    axes = zip(shown.degrees, shown.placements, strict=True)
    placements = [_torch_placement(placement) for degree, placement in axes if degree > 1]
    return DTensor.from_local(
        local,
        mesh.device_mesh(shown.axes),
        placements or [distributed.Replicate()],
        run_check=False,
        shape=torch.Size(shown.shape),
        stride=torch.empty(shown.shape, device="meta").stride(),
    )


def expressible(layout: Layout) -> Layout:
    """Return `layout` with `Replicate` along the axes whose placement a `DTensor` does not support."""
    axes = layout.axis_degrees
    if layout.blocked_dim is not None:
        return Layout(layout.shape, axes)
    rows = _by_rows(layout)
    placements = rows.axis_placements
    sizes = [{size} for size in rows.shape]
    for axis, placement in placements.items():
        if isinstance(placement, Flat):
            placements[axis] = Replicate()
        elif isinstance(placement, Shard):
            cut = sizes[placement.dim]
            if placement.copies == 1 and all(_same_rows(size, axes[axis]) for size in cut):
                sizes[placement.dim] = {len(part) for size in cut for part in divide(size, axes[axis])}
            else:
                placements[axis] = Replicate()
    return Layout(rows.shape, axes, placements)


def _by_rows(layout: Layout) -> Layout:
    """Return `layout` with `Shard(0)` instead of `Flat` if all shards stay the same; otherwise `layout`."""
    placements = layout.axis_placements
    flat = {axis: Shard(0) for axis, placement in placements.items() if isinstance(placement, Flat)}
    if not flat or not layout.shape:
        return layout
    rows = Layout(layout.shape, layout.axis_degrees, placements | flat)
    return rows if all(_box(layout, where) == rows.box(where) for where in rows.coordinates()) else layout


def _box(layout: Layout, where: Coordinate) -> Box | None:
    try:
        return layout.box(where)
    except LayoutError:
        return None


def _same_rows(size: int, parts: int) -> bool:
    """Return whether `DTensor` divides `size` rows over `parts` ranks as plait does."""
    each = -(-size // parts)
    return [len(part) for part in divide(size, parts)] == [
        min(each, max(0, size - part * each)) for part in range(parts)
    ]


def _torch_placement(placement: Placement) -> distributed.Placement:
    if isinstance(placement, Shard):
        return distributed.Shard(placement.dim)
    return distributed.Partial() if isinstance(placement, Partial) else distributed.Replicate()
