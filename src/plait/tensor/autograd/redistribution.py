"""Redistribution of a tensor and its gradient from one layout to another, by collectives along mesh axes.

`paired_collectives` serves the inside of layers: one axis and one known pair at a time. `redistribute` serves
layers of your own and conversions between layouts.

    along an axis            forward               layouts of the gradient     backward
    Replicate → Shard        this rank's shard     Shard → Replicate           all-gather
    Shard → Replicate        all-gather            Replicate → Shard           this rank's shard
    Partial → Replicate      all-reduce            Replicate → Replicate       nothing
    Partial → Shard          reduce-scatter        Shard → Replicate           all-gather
    Shard → another Shard    all-to-all            Shard → another Shard       all-to-all
    Replicate → Partial      first rank: the tensor Replicate → Replicate       nothing
    Shard → Partial          zeros around it       Replicate → Shard           this rank's shard

    with `own`               forward               layouts of the gradient     backward
    Replicate → Replicate    nothing               Partial → Replicate         all-reduce
    Shard → Replicate        all-gather            Partial → Shard             reduce-scatter
    Partial → Replicate      all-reduce            Partial → Replicate         all-reduce

`Flat` behaves as `Shard`, but goes to another cut through `Replicate`. The gradient of a shard is the shard
of the gradient, and each summand has the gradient of the sum, as for JAX's global arrays and for `DTensor`.
A replicated tensor has one value, and one gradient on every rank, if all ranks compute the same with it.
Where each rank along an axis computes something else with it, as between `copy` and `reduce`, the ranks'
gradients are summands of that gradient: name the axis in `own` (`Partial` in `to_local(grad_placements=…)`
of a `DTensor`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.errors import LayoutError
from plait.plan.layout.layout import Coordinate, Layout, Partial, Replicate, Shard
from plait.plan.layout.shards import intersection, slices_within
from plait.plan.layout.transitions import Move, moves
from plait.ranks.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from plait.ranks.group import Group
from plait.ranks.mesh import GridMesh
from plait.tensor.autograd.paired_collectives import copy, reduce

_REGION_AXIS = "tp"


def redistribute(
    tensor: Tensor, source: Layout, target: Layout, mesh: GridMesh, *, own: Collection[str] = ()
) -> Tensor:
    """Convert `tensor`, this rank's shard under layout `source`, to its shard under `target`.

    Every rank of `mesh` along the axes of the layouts calls it, with its own shard. `own` names axes along
    which each rank uses a replicated result in its own way; the module says what follows for the gradient.
    First-order only. Returns new memory, or `tensor` itself where nothing changes.
    Communication: `plait.plan.layout.moves(source, target)`, and for the gradient as in the table. Shards of
    unequal sizes are padded to the largest. Raises `LayoutError` for layouts of other shapes or axes, for
    axes that the mesh lacks or has with other degrees, and for a tensor of another shape than its shard.
    """
    there = moves(source, target)
    where = _require_fitting(tensor, source, mesh)
    gradient = _gradient_layout(target, own)
    back = moves(gradient, _gradient_layout(source))
    if not there and not back:
        return tensor
    # On meta nothing is sent, but `plait.proof.gradient_proof` needs nodes where a region begins and ends.
    enters, leaves = _crossing(source, gradient, target) if tensor.is_meta else (False, False)
    entered = copy(tensor, mesh.group(_REGION_AXIS)) if enters else tensor
    result: Tensor = _Redistribution.apply(entered, there, back, mesh, where)  # type: ignore[no-untyped-call]
    return reduce(result, mesh.group(_REGION_AXIS)) if leaves else result


@torch.no_grad()
def full_tensor(shard: Tensor, layout: Layout, mesh: GridMesh) -> Tensor:
    """Return the whole tensor, gathered from the ranks' shards under `layout`, without a gradient.

    Every rank along the axes of the layout calls it and gets the whole; `shard` itself where that is whole.
    Communication: as `redistribute` to a replicated layout, over each axis that shards.
    """
    axes = layout.axis_degrees
    if layout.blocked_dim is None:
        return redistribute(shard.detach(), layout, Layout(layout.shape, axes), mesh)
    if any(isinstance(p, Shard) and isinstance(p.blocks, tuple) for p in layout.placements):
        return _of_unequal_blocks(shard.detach(), layout, mesh)
    split = _with_blocks_as_dim(layout)
    where = tuple(mesh.index(axis) for axis in layout.axes)
    by_blocks = shard.detach().reshape(split.local_shape(where))
    return redistribute(by_blocks, split, Layout(split.shape, axes), mesh).reshape(layout.shape)


def _of_unequal_blocks(shard: Tensor, layout: Layout, mesh: GridMesh) -> Tensor:
    """Return the whole tensor: the ranks' shards one after another, their blocks then put in order."""
    axes, placements, blocks, parts = layout.axis_degrees, layout.axis_placements, tuple[int, ...](), 1
    for axis, placement in layout.axis_placements.items():
        if isinstance(placement, Shard) and isinstance(placement.blocks, tuple):
            placements[axis] = replace(placement, blocks=1)
            blocks, parts = placement.blocks, axes[axis] // placement.copies
    gathered = redistribute(shard, Layout(layout.shape, axes, placements), Layout(layout.shape, axes), mesh)
    dim = layout.blocked_dim
    assert dim is not None
    shards = [torch.split(one, [rows // parts for rows in blocks], dim) for one in gathered.chunk(parts, dim)]
    return torch.cat([part for block in zip(*shards, strict=True) for part in block], dim)


def _with_blocks_as_dim(layout: Layout) -> Layout:
    """Return the layout of the tensor reshaped with its blocked dim as two: block, index in the block."""
    dim, placements, blocks = layout.blocked_dim, layout.axis_placements, 1
    assert dim is not None
    for axis, placement in layout.axis_placements.items():
        if isinstance(placement, Shard):
            assert isinstance(placement.blocks, int)
            blocks = max(blocks, placement.blocks)
            placements[axis] = Shard(placement.dim + (placement.dim >= dim), placement.copies)
    shape = *layout.shape[:dim], blocks, layout.shape[dim] // blocks, *layout.shape[dim + 1 :]
    return Layout(shape, layout.axis_degrees, placements)


def _gradient_layout(layout: Layout, own: Collection[str] = ()) -> Layout:
    """Return the gradient's layout: `Partial` becomes `Replicate`, and the axes `own` become `Partial`."""
    for axis in own:
        if axis not in layout.axes or not isinstance(layout.placements[layout.axes.index(axis)], Replicate):
            raise LayoutError(
                f"own names axis {axis!r}, along which {layout} does not replicate: own takes axes "
                "along which ranks hold the same tensor, so leave it out."
            )
    placements = {
        axis: Partial() if axis in own else Replicate() if isinstance(placement, Partial) else placement
        for axis, placement in layout.axis_placements.items()
    }
    return Layout(layout.shape, layout.axis_degrees, placements)


def _require_fitting(tensor: Tensor, source: Layout, mesh: GridMesh) -> Coordinate:
    """Return this rank's coordinate. Raises `LayoutError` where layout, mesh and tensor do not match."""
    plain = [part for axis in source.axes for part in mesh.axes_of(axis)]
    sizes = {axis: mesh.size(axis) for axis in source.axes}
    if len(set(plain)) < len(plain) or tuple(sizes.values()) != source.degrees:
        raise LayoutError(
            f"{source} does not fit {mesh}: give each axis as many ranks as the mesh has along it, and none "
            "twice (dp is replicate and shard)."
        )
    where = tuple(mesh.index(axis) for axis in source.axes)
    if tuple(tensor.shape) != source.local_shape(where):
        raise LayoutError(
            f"a tensor of shape {list(tensor.shape)} is not what rank {mesh.rank} holds under {source}: give "
            f"its shard, {list(source.local_shape(where))}."
        )
    return where


def _crossing(source: Layout, gradient: Layout, target: Layout) -> tuple[bool, bool]:
    """Return whether the redistribution enters a tensor-parallel region, and whether it leaves one."""
    if _REGION_AXIS not in source.axes or source.degrees[source.axes.index(_REGION_AXIS)] == 1:
        return False, False
    place = source.axes.index(_REGION_AXIS)
    was_whole = isinstance(source.placements[place], Replicate)
    is_whole = all(isinstance(one.placements[place], Replicate) for one in (target, gradient))
    return was_whole and not is_whole, is_whole and not was_whole


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        there: Sequence[Move],
        back: Sequence[Move],
        mesh: GridMesh,
        where: Coordinate,
    ) -> Tensor:
        ctx.back, ctx.mesh, ctx.where = back, mesh, where
        return _run(there, tensor, mesh, where) if there else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _run(ctx.back, gradient, ctx.mesh, ctx.where), None, None, None, None


def _run(path: Sequence[Move], tensor: Tensor, mesh: GridMesh, where: Coordinate) -> Tensor:
    for move in path:
        if tensor.is_meta:
            tensor = tensor.new_empty(move.target.local_shape(where))
        else:
            tensor = _STEPS[move.by](tensor, move, mesh.group(move.axis), where)
    return tensor


def _cut(tensor: Tensor, move: Move, group: Group, where: Coordinate) -> Tensor:
    return _part(tensor, move.source, move.target, where).clone(memory_format=torch.contiguous_format)


def _summand(tensor: Tensor, move: Move, group: Group, where: Coordinate) -> Tensor:
    result = tensor.new_zeros(move.target.local_shape(where))
    if move.source.owner(where)[move.source.axes.index(move.axis)] == group.index:
        _part(result, move.target, move.source, where).copy_(tensor)
    return result


def _all_gather(tensor: Tensor, move: Move, group: Group, where: Coordinate) -> Tensor:
    source, peers = move.source, _peers(move, where)
    shapes = [source.local_shape(peer) for peer in peers]
    largest = max(map(prod, shapes))
    everyone = all_gather(_padded([tensor], largest), group, checked=False).wait()
    result = tensor.new_empty(move.target.local_shape(where))
    for peer, shape, shard in zip(peers, shapes, everyone.view(group.size, largest), strict=True):
        if _is_first_copy(peer, move):
            into = _part(result, move.target, source, peer)
            into.copy_(shard[: prod(shape)].view(shape))
    return result


def _all_reduce(tensor: Tensor, move: Move, group: Group, where: Coordinate) -> Tensor:
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return all_reduce(tensor, group, out=out, checked=False).wait()


def _reduce_scatter(tensor: Tensor, move: Move, group: Group, where: Coordinate) -> Tensor:
    parts = [_part(tensor, move.source, move.target, peer) for peer in _peers(move, where)]
    largest = max(part.numel() for part in parts)
    total = reduce_scatter(_padded(parts, largest), group, checked=False).wait()
    mine = parts[group.index]
    return total[: mine.numel()].view(mine.shape)


def _all_to_all(tensor: Tensor, move: Move, group: Group, where: Coordinate) -> Tensor:
    peers = _peers(move, where)
    held, wanted = ([layout.region(peer) for peer in peers] for layout in (move.source, move.target))
    mine, next_mine = held[group.index], wanted[group.index]
    largest = max(intersection(one, other).numel for one in held for other in wanted)
    parts = [tensor[slices_within(intersection(mine, other), mine)] for other in wanted]
    arrived = all_to_all(_padded(parts, largest), group, checked=False).wait()
    result = tensor.new_empty(next_mine.sizes)
    for peer, region, shard in zip(peers, held, arrived.view(group.size, largest), strict=True):
        box = intersection(region, next_mine)
        if _is_first_copy(peer, move):
            result[slices_within(box, next_mine)] = shard[: box.numel].view(box.sizes)
    return result


_STEPS = {
    "cut": _cut,
    "summand": _summand,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _part(whole: Tensor, outer: Layout, inner: Layout, where: Coordinate) -> Tensor:
    """Return the shard at `where` under layout `inner`: a view of `whole`, the shard under layout `outer`."""
    interval, around = inner.interval(where), outer.interval(where)
    if interval is None:
        return whole[slices_within(inner.region(where), outer.region(where))]
    first = 0 if around is None else around.start
    return whole.reshape(-1)[interval.start - first : interval.stop - first].view(inner.local_shape(where))


def _peers(move: Move, where: Coordinate) -> list[Coordinate]:
    """Return the coordinates that differ from `where` at most along the axis of `move`, in order."""
    place = move.source.axes.index(move.axis)
    return [(*where[:place], index, *where[place + 1 :]) for index in range(move.source.degrees[place])]


def _is_first_copy(peer: Coordinate, move: Move) -> bool:
    """Return whether `peer` is the first of the ranks along the axis of `move` that hold the same shard."""
    place = move.source.axes.index(move.axis)
    placement = move.source.placements[place]
    return not isinstance(placement, Shard) or peer[place] % placement.copies == 0


def _padded(parts: Sequence[Tensor], largest: int) -> Tensor:
    """Return the parts concatenated, each padded to `largest` elements: `[parts * largest]`."""
    if len(parts) == 1 and parts[0].numel() == largest:
        return parts[0].reshape(-1)
    result = parts[0].new_zeros(len(parts), largest)
    for slot, part in zip(result, parts, strict=True):
        slot[: part.numel()] = part.reshape(-1)
    return result.view(-1)
