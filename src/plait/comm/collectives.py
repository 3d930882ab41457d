"""Collectives of a group. Each starts at once and returns a handle; several may be in flight.

Every rank of the group makes the same calls in the same order. A `checked` call verifies that first: it
blocks until all ranks have made the call, and raises on every rank if the calls differ. Without the check, as
on the hot path whose shapes were checked before, a mismatch ends the process or hangs until the timeout.

Results are the same bits on every rank and in every run. Pieces are in order of the index. A rank that is
alone gets its own tensor back. Traffic counts the bytes of the tensor that a rank passes. Any call may raise
`CommunicationError`: here for its arguments, from `Handle.wait()` for failures of the operation.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from plait.comm.buffers import copy_out, dense, output_buffer
from plait.comm.dispatch import (
    buffer_error,
    check_and_count,
    copy_to,
    division_error,
    index_error,
    piece_shape,
    start,
    whole_shape,
)
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.transport.reduction import Op, reduction_error


def all_reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Reduce over the group, in place on every rank, or into `out`.

    On the CPU the sum is in rank order, of 16-bit floats in float32, except for large tensors over Gloo
    between hosts. Tensors made by `shared_zeros` are reduced in shared memory.
    """
    error = reduction_error(op, tensor.dtype) or buffer_error(out, tensor.shape, tensor)
    transport = group.transport
    in_place = out is None and transport is not None and transport.shares(tensor)
    detail = f"{op} in shared memory" if in_place else op
    check_and_count("all_reduce", tensor, group, detail=detail, error=error, checked=checked)
    if transport is None:
        return Handle.done(copy_to(tensor, out), group)
    target = tensor if out is None else out
    total = output_buffer(target, tensor.shape, tensor)
    launch = partial(transport.all_reduce, tensor, total, op)
    return start("all_reduce", group, launch, lambda: copy_out(total, target))


def reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, destination: int = 0, checked: bool = True
) -> Handle[Tensor]:
    """Reduce in place on the rank with index `destination`; `tensor` is undefined on the other ranks."""
    error = reduction_error(op, tensor.dtype) or index_error(destination, group)
    detail = f"{op} to {destination}"
    check_and_count("reduce", tensor, group, detail=detail, error=error, checked=checked)
    if group.transport is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)

    def finish() -> Tensor:
        return copy_out(mine, tensor) if group.index == destination else tensor

    return start("reduce", group, partial(group.transport.reduce, mine, op, destination), finish)


def reduce_scatter(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Reduce over the group and keep this rank's piece: `[size * n, ...]` to `[n, ...]`, in `out` if given.

    On the CPU the sum is in rank order, of 16-bit floats in float32. `out` may be a piece of `tensor`.
    """
    shape = piece_shape(tensor, group)
    error = (
        reduction_error(op, tensor.dtype) or division_error(tensor, group) or buffer_error(out, shape, tensor)
    )
    transport = group.transport
    in_place = transport is not None and transport.shares(tensor)
    detail = f"{op} in shared memory" if in_place else op
    check_and_count("reduce_scatter", tensor, group, detail=detail, error=error, checked=checked)
    if transport is None:
        return Handle.done(copy_to(tensor, out), group)
    piece = output_buffer(out, shape, tensor)
    launch = partial(transport.reduce_scatter, tensor, piece, op)
    return start("reduce_scatter", group, launch, lambda: copy_out(piece, out))


def all_gather(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Concatenate the ranks' tensors along dim 0: `[n, ...]` to `[size * n, ...]`, in `out` if given.

    `tensor` may be this rank's piece of `out`. A 0-d tensor counts as `[1]`.
    """
    shape = whole_shape(tensor, group)
    check_and_count("all_gather", tensor, group, error=buffer_error(out, shape, tensor), checked=checked)
    if group.transport is None:
        return Handle.done(copy_to(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    whole = output_buffer(out, shape, mine)
    launch = partial(group.transport.all_gather, mine, whole)
    return start("all_gather", group, launch, lambda: copy_out(whole, out))


def all_to_all(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Send the i-th of `size` equal pieces of dim 0 to index i; return the received pieces in order.

    `[size * n, ...]` to the same shape, in `out` if given, which is other memory than `tensor`.
    """
    error = division_error(tensor, group) or buffer_error(out, tensor.shape, tensor)
    check_and_count("all_to_all", tensor, group, error=error, checked=checked)
    if group.transport is None:
        return Handle.done(copy_to(tensor, out), group)
    received = output_buffer(out, tensor.shape, tensor)
    launch = partial(group.transport.all_to_all, dense(tensor), received)
    return start("all_to_all", group, launch, lambda: copy_out(received, out))


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, checked: bool = True) -> Handle[Tensor]:
    """Overwrite the tensor of every rank with that of the rank with index `source`, in place."""
    error = index_error(source, group)
    check_and_count("broadcast", tensor, group, detail=f"from {source}", error=error, checked=checked)
    if group.transport is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)
    launch = partial(group.transport.broadcast, mine, source)
    return start("broadcast", group, launch, lambda: copy_out(mine, tensor))


def gather(
    tensor: Tensor, group: Group, destination: int = 0, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor | None]:
    """All-gather to the rank with index `destination` only; the other ranks get None."""
    shape = whole_shape(tensor, group)
    error = index_error(destination, group) or buffer_error(out, shape, tensor)
    check_and_count("gather", tensor, group, detail=f"to {destination}", error=error, checked=checked)
    if group.transport is None:
        return Handle.done(copy_to(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    whole = output_buffer(out, shape, mine) if group.index == destination else None

    def finish() -> Tensor | None:
        return None if whole is None else copy_out(whole, out)

    return start("gather", group, partial(group.transport.gather, mine, whole, destination), finish)


def scatter(
    pieces: Tensor | None, group: Group, source: int = 0, *, out: Tensor, checked: bool = True
) -> Handle[Tensor]:
    """Fill every rank's `out[n, ...]` with its piece of the source's `pieces[size * n, ...]`.

    `source` is an index in the group; the other ranks may pass `None` (and count no bytes).
    """
    shape = whole_shape(out, group)
    sends = group.index == source
    error = index_error(source, group)
    if error is None and sends:
        error = "the source has no pieces" if pieces is None else buffer_error(pieces, shape, out)
    payload = pieces if sends else None
    sent = 0 if payload is None else payload.nbytes
    detail = f"from {source}"
    check_and_count("scatter", out, group, detail=detail, error=error, checked=checked, payload=sent)
    if group.transport is None:
        assert payload is not None
        return Handle.done(copy_to(payload.reshape(out.shape), out), group)
    mine = None if payload is None else dense(payload)
    own = output_buffer(out, out.shape, out)
    launch = partial(group.transport.scatter, mine, own, source)
    return start("scatter", group, launch, lambda: copy_out(own, out))


def barrier(group: Group, *, checked: bool = True) -> Handle[None]:
    """Wait until every rank of the group has called it. The wait blocks the host, on NCCL too."""
    check_and_count("barrier", None, group, error=None, checked=checked)
    if group.transport is None:
        return Handle.done(None, group)
    return start("barrier", group, group.transport.barrier, lambda: None)
