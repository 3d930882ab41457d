"""Collectives that reduce; `collectives` says what holds for all."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import arithmetic
from plait.comm.arithmetic import Op
from plait.comm.backend import deliver, dense, landing, reduce_scatter_single
from plait.comm.call import alone, begin, outside, piece_shape, start, swap, undivided, unfit
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.shared import all_reduce_shared, sharers


def all_reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Reduce over the group, in place on every rank; or into `out`, and `tensor` stays what it is.

    Small tensors on Gloo go whole to every rank and are reduced in rank order, 16-bit floats in float32.
    Tensors made by `shared_zeros` are reduced where they lie.
    """
    flaw = arithmetic.flaw(op, tensor.dtype) or unfit(out, tensor.shape, tensor)
    begin("all_reduce", tensor, group, detail=op, flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor, out), group)
    everyone = sharers(tensor, group) if out is None else None
    if everyone is not None:
        return all_reduce_shared(everyone, op, group)
    target = tensor if out is None else out
    if arithmetic.exchanges_whole(tensor, group):
        copies = tensor.detach().expand(group.size, *tensor.shape).contiguous()
        pieces = torch.empty_like(copies)
        total = landing(target, tensor.shape, tensor)

        def finish_exchange() -> Tensor:
            arithmetic.fold(list(pieces), op, total)
            return deliver(total, target)

        return start("all_reduce", group, partial(swap, pieces, copies, group), finish_exchange)
    mine = dense(tensor if out is None else out.detach().copy_(tensor))
    launch = partial(dist.all_reduce, mine, arithmetic.native(op), group.process_group, async_op=True)

    def finish() -> Tensor:
        arithmetic.finish_mean(mine, op, group.size)
        return deliver(mine, target)

    return start("all_reduce", group, launch, finish)


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

    On Gloo the pieces are exchanged and reduced in rank order (16-bit floats in float32), by whoever waits:
    Gloo's own would be a whole all-reduce. `out` may be a piece of `tensor`.
    """
    flaw = arithmetic.flaw(op, tensor.dtype) or undivided(tensor, group)
    shape = piece_shape(tensor, group)
    flaw = flaw or unfit(out, shape, tensor)
    begin("reduce_scatter", tensor, group, detail=op, flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor, out), group)
    mine = dense(tensor)
    landed = landing(out, shape, mine)
    if not mine.is_cuda and group.uses_gloo:
        pieces = torch.empty_like(mine)

        def finish_exchange() -> Tensor:
            arithmetic.fold(list(pieces.view(group.size, *shape)), op, landed)
            return deliver(landed, out)

        return start("reduce_scatter", group, partial(swap, pieces, mine, group), finish_exchange)

    def finish() -> Tensor:
        arithmetic.finish_mean(landed, op, group.size)
        return deliver(landed, out)

    launch = partial(reduce_scatter_single, landed, mine, arithmetic.native(op), group)
    return start("reduce_scatter", group, launch, finish)
