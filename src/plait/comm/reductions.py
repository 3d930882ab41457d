"""Collectives that reduce; `collectives` says what holds for all."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import arithmetic, nearby
from plait.comm.arithmetic import Op
from plait.comm.backend import deliver, dense, landing, reduce_scatter_single
from plait.comm.call import alone, begin, outside, piece_shape, start, swap, undivided, unfit
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.shared import sharers


def all_reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Reduce over the group, in place on every rank; or into `out`, and `tensor` stays what it is.

    On one host the ranks show each other their tensors in shared memory; else small tensors on Gloo go whole
    to every rank (`arithmetic` says when). Both reduce in rank order, 16-bit floats in float32. Tensors
    made by `shared_zeros` are reduced where they lie.
    """
    flaw = arithmetic.flaw(op, tensor.dtype) or unfit(out, tensor.shape, tensor)
    everyone = sharers(tensor, group) if out is None else None
    detail = op if everyone is None else f"{op} in shared memory"
    begin("all_reduce", tensor, group, detail=detail, flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor, out), group)
    if everyone is not None:
        return start(
            "all_reduce", group, partial(nearby.reduce_in_place, everyone, op, group), lambda: tensor
        )
    target = tensor if out is None else out
    way = arithmetic.way_to_all_reduce(tensor, group)
    if way == "backend":
        return _all_reduce_by_backend(tensor, out, op, group)
    total = landing(target, tensor.shape, tensor)
    if way == "exchange":
        copies = tensor.detach().expand(group.size, *tensor.shape).contiguous()
        return _exchange("all_reduce", copies, total, target, op, group)
    reduction = nearby.reduce_whole if way == "whole" else nearby.reduce_in_pieces
    launch = partial(reduction, tensor, total, op, group)
    return start("all_reduce", group, launch, lambda: deliver(total, target))


def _all_reduce_by_backend(tensor: Tensor, out: Tensor | None, op: Op, group: Group) -> Handle[Tensor]:
    mine = dense(tensor if out is None else out.detach().copy_(tensor))
    target = tensor if out is None else out
    launch = partial(dist.all_reduce, mine, arithmetic.native(op), group.process_group, async_op=True)

    def finish() -> Tensor:
        arithmetic.finish_mean(mine, op, group.size)
        return deliver(mine, target)

    return start("all_reduce", group, launch, finish)


def _exchange(
    kind: str, parcels: Tensor, total: Tensor, out: Tensor | None, op: Op, group: Group
) -> Handle[Tensor]:
    """Send each rank its part of `parcels`, as many along dim 0, and reduce what comes into `total`."""
    arrived = torch.empty_like(parcels)

    def finish() -> Tensor:
        arithmetic.fold(arrived.view(-1).tensor_split(group.size), op, total.view(-1))
        return deliver(total, out)

    return start(kind, group, partial(swap, arrived, parcels, group), finish)


def reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, destination: int = 0, checked: bool = True
) -> Handle[Tensor]:
    """Reduce in place on the rank with index `destination`; what the others then hold is undefined."""
    flaw = arithmetic.flaw(op, tensor.dtype) or outside(destination, group)
    begin("reduce", tensor, group, detail=f"{op} to {destination}", flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)
    launch = partial(
        dist.reduce,
        mine,
        op=arithmetic.native(op),
        group=group.process_group,
        async_op=True,
        group_dst=destination,
    )

    def finish() -> Tensor:
        if group.index == destination:
            arithmetic.finish_mean(mine, op, group.size)
            deliver(mine, tensor)
        return tensor

    return start("reduce", group, launch, finish)


def reduce_scatter(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Reduce over the group and keep this rank's piece: `[size * n, ...]` to `[n, ...]`, in `out` if given.

    On Gloo in rank order (16-bit floats in float32), by whoever waits: on one host in shared memory, else the
    pieces are exchanged; Gloo's own would be a whole all-reduce. `out` may be a piece of `tensor`.
    """
    flaw = arithmetic.flaw(op, tensor.dtype) or undivided(tensor, group)
    shape = piece_shape(tensor, group)
    flaw = flaw or unfit(out, shape, tensor)
    everyone = sharers(tensor, group)
    detail = op if everyone is None else f"{op} in shared memory"
    begin("reduce_scatter", tensor, group, detail=detail, flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor, out), group)
    landed = landing(out, shape, tensor)
    if everyone is not None:
        meet = partial(nearby.reduce_to_own_piece, everyone, landed, op, group)
        return start("reduce_scatter", group, meet, lambda: deliver(landed, out))
    way = arithmetic.way_to_reduce_scatter(tensor, group)
    if way == "whole":
        show = partial(nearby.reduce_to_pieces, tensor, landed, op, group)
        return start("reduce_scatter", group, show, lambda: deliver(landed, out))
    mine = dense(tensor)
    if way == "exchange":
        return _exchange("reduce_scatter", mine, landed, out, op, group)

    def finish() -> Tensor:
        arithmetic.finish_mean(landed, op, group.size)
        return deliver(landed, out)

    launch = partial(reduce_scatter_single, landed, mine, arithmetic.native(op), group)
    return start("reduce_scatter", group, launch, finish)
