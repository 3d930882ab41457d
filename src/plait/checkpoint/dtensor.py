"""A local tensor and its layout as a `DTensor`, over the groups that the mesh has.

    plait                          DTensor
    Replicate()                    Replicate()
    Shard(dim)                     Shard(dim), where `DTensor` cuts at the same rows
    Flat(bounds)                   Shard(0), where these are rows, and its rows
    Partial()                      Partial()
    anything else                  Replicate(): the pieces are gathered along that axis

`DTensor` cuts as `torch.chunk` does: ten rows for four ranks are 3, 3, 3, 1, where `divide` gives 3, 3, 2, 2.
It has no word for heads that neighbours hold alike, for linears that are several in one, nor for pieces that
end inside a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor

from plait.autograd.redistribution import full_tensor, redistribute
from plait.comm.grid_mesh import GridMesh
from plait.errors import LayoutError
from plait.layout import Box, Coordinate, Flat, Layout, Partial, Placement, Replicate, Shard, divide

__all__ = ["DTensor", "as_dtensor", "expressible"]


def as_dtensor(tensor: Tensor, layout: Layout, mesh: GridMesh) -> DTensor:
    """The global tensor that `tensor` is this rank's piece of under `layout`, without a gradient.

    Its `DeviceMesh` has those axes of the layout that have more than one rank, in their order and under their
    names. Where `expressible(layout)` is `layout` it shares the memory of `tensor`; else it is a copy, which
    all ranks along the axes that are gathered take part in. Communication: as `redistribute` from the one to
    the other. Raises `LayoutError` as that does, and `MeshError` without an initialised world.
    """
    shown = expressible(layout)
    local = _shown(tensor.detach().to(mesh.device), layout, shown, mesh)
    axes = zip(shown.degrees, shown.placements, strict=True)
    placements = [_placement(p) for degree, p in axes if degree > 1]
    return DTensor.from_local(
        local,
        mesh.device_mesh(shown.axes),
        placements or [distributed.Replicate()],
        run_check=False,
        shape=torch.Size(shown.shape),
        stride=torch.empty(shown.shape, device="meta").stride(),
    )


def _shown(tensor: Tensor, layout: Layout, shown: Layout, mesh: GridMesh) -> Tensor:
    """This rank's piece under `shown`."""
    if layout.blocked_dim is None:
        return redistribute(tensor, _by_rows(layout), shown, mesh)
    return full_tensor(tensor, layout, mesh)


def expressible(layout: Layout) -> Layout:
    """The layout that a `DTensor` can have: in which some axes replicate, if `layout` is none."""
    if layout.blocked_dim is not None:
        return Layout(layout.shape, dict(zip(layout.axes, layout.degrees, strict=True)))
    rows = _by_rows(layout)
    axes = dict(zip(rows.axes, rows.degrees, strict=True))
    placements = dict(zip(rows.axes, rows.placements, strict=True))
    sizes = [{size} for size in rows.shape]
    for axis, placement in placements.items():
        if isinstance(placement, Flat):
            placements[axis] = Replicate()
        elif isinstance(placement, Shard):
            cut = sizes[placement.dim]
            if placement.copies == 1 and all(_cuts_alike(size, axes[axis]) for size in cut):
                sizes[placement.dim] = {len(part) for size in cut for part in divide(size, axes[axis])}
            else:
                placements[axis] = Replicate()
    return Layout(rows.shape, axes, placements)


def _by_rows(layout: Layout) -> Layout:
    """The same pieces under the name of `Shard(0)`, where flat ones are its rows; else `layout`."""
    axes = dict(zip(layout.axes, layout.degrees, strict=True))
    kept = dict(zip(layout.axes, layout.placements, strict=True))
    flat = next((axis for axis, placement in kept.items() if isinstance(placement, Flat)), None)
    if flat is None or not layout.shape:
        return layout
    rows = Layout(layout.shape, axes, kept | {flat: Shard(0)})
    return rows if all(_box(layout, where) == rows.box(where) for where in rows.coordinates()) else layout


def _box(layout: Layout, where: Coordinate) -> Box | None:
    try:
        return layout.box(where)
    except LayoutError:
        return None


def _cuts_alike(size: int, parts: int) -> bool:
    """Whether `DTensor` cuts rows where plait does."""
    each = -(-size // parts)
    return [len(part) for part in divide(size, parts)] == [
        min(each, max(0, size - part * each)) for part in range(parts)
    ]


def _placement(placement: Placement) -> distributed.Placement:
    """As `DTensor` calls it."""
    if isinstance(placement, Shard):
        return distributed.Shard(placement.dim)
    return distributed.Partial() if isinstance(placement, Partial) else distributed.Replicate()
