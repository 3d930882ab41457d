"""Collectives of a group. Each starts at once and returns a handle; several may be in flight.

Every rank of the group makes the same calls in the same order. A `checked` call first makes sure of that: it
blocks until the group has come, and fails on every rank if one means something else. Without the check, as on
the hot path whose shapes were agreed on before, a mismatch ends the process or hangs until the timeout.

Results are the same bits on every rank, whoever comes first. Pieces are in order of the index. A rank that is
alone gets its own tensor back. Traffic counts the bytes of the tensor that a rank hands in. Any call may
raise `CommunicationError`: here for its arguments, from `Handle.wait()` for what happens on the way.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from plait.comm.buffers import copy_out, dense, output_buffer
from plait.comm.dispatch import alone, begin, outside, piece_shape, start, undivided, unfit, whole_shape
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.transport import reduction
from plait.comm.transport.reduction import Op


def all_reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Reduce over the group, in place on every rank; or into `out`, and `tensor` stays what it is.

    On the CPU in rank order, 16-bit floats in float32, but for large tensors that go over Gloo from host to
    host. Tensors made by `shared_zeros` are reduced where they lie.
    """
    flaw = reduction.refusal(op, tensor.dtype) or unfit(out, tensor.shape, tensor)
    transport = group.transport
    in_place = out is None and transport is not None and transport.shares(tensor)
    begin(
        "all_reduce",
        tensor,
        group,
        detail=f"{op} in shared memory" if in_place else op,
        flaw=flaw,
        checked=checked,
    )
    if transport is None:
        return Handle.done(alone(tensor, out), group)
    target = tensor if out is None else out
    total = output_buffer(target, tensor.shape, tensor)
    launch = partial(transport.all_reduce, tensor, total, op)
    return start("all_reduce", group, launch, lambda: copy_out(total, target))


def reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, destination: int = 0, checked: bool = True
) -> Handle[Tensor]:
    """Reduce in place on the rank with index `destination`; what the others then hold is undefined."""
    flaw = reduction.refusal(op, tensor.dtype) or outside(destination, group)
    begin("reduce", tensor, group, detail=f"{op} to {destination}", flaw=flaw, checked=checked)
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

    On the CPU in rank order (16-bit floats in float32). `out` may be a piece of `tensor`.
    """
    shape = piece_shape(tensor, group)
    flaw = reduction.refusal(op, tensor.dtype) or undivided(tensor, group) or unfit(out, shape, tensor)
    transport = group.transport
    in_place = transport is not None and transport.shares(tensor)
    begin(
        "reduce_scatter",
        tensor,
        group,
        detail=f"{op} in shared memory" if in_place else op,
        flaw=flaw,
        checked=checked,
    )
    if transport is None:
        return Handle.done(alone(tensor, out), group)
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
    begin("all_gather", tensor, group, flaw=unfit(out, shape, tensor), checked=checked)
    if group.transport is None:
        return Handle.done(alone(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    whole = output_buffer(out, shape, mine)
    launch = partial(group.transport.all_gather, mine, whole)
    return start("all_gather", group, launch, lambda: copy_out(whole, out))


def all_to_all(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Send the i-th of `size` equal pieces of dim 0 to index i; give what came, in order, in `out` if given.

    `[size * n, ...]` to the same shape. `out` is other memory than `tensor`.
    """
    flaw = undivided(tensor, group) or unfit(out, tensor.shape, tensor)
    begin("all_to_all", tensor, group, flaw=flaw, checked=checked)
    if group.transport is None:
        return Handle.done(alone(tensor, out), group)
    received = output_buffer(out, tensor.shape, tensor)
    launch = partial(group.transport.all_to_all, dense(tensor), received)
    return start("all_to_all", group, launch, lambda: copy_out(received, out))


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, checked: bool = True) -> Handle[Tensor]:
    """Overwrite the tensor of every rank by that of the rank with index `source`, in place."""
    flaw = outside(source, group)
    begin("broadcast", tensor, group, detail=f"from {source}", flaw=flaw, checked=checked)
    if group.transport is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)
    launch = partial(group.transport.broadcast, mine, source)
    return start("broadcast", group, launch, lambda: copy_out(mine, tensor))


def gather(
    tensor: Tensor, group: Group, destination: int = 0, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor | None]:
    """`all_gather`, but only the rank with index `destination` gets the result; the others get `None`."""
    shape = whole_shape(tensor, group)
    flaw = outside(destination, group) or unfit(out, shape, tensor)
    begin("gather", tensor, group, detail=f"to {destination}", flaw=flaw, checked=checked)
    if group.transport is None:
        return Handle.done(alone(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    whole = output_buffer(out, shape, mine) if group.index == destination else None

    def finish() -> Tensor | None:
        return None if whole is None else copy_out(whole, out)

    return start("gather", group, partial(group.transport.gather, mine, whole, destination), finish)


def scatter(
    pieces: Tensor | None, group: Group, source: int = 0, *, out: Tensor, checked: bool = True
) -> Handle[Tensor]:
    """Fill every rank's `out[n, ...]` with its piece of `pieces[size * n, ...]`, which only the source has.

    `source` is an index in the group; the other ranks may pass `None` (and count no bytes).
    """
    shape = whole_shape(out, group)
    sends = group.index == source
    flaw = outside(source, group)
    if flaw is None and sends:
        flaw = "the source has no pieces" if pieces is None else unfit(pieces, shape, out)
    payload = pieces if sends else None
    sent = 0 if payload is None else payload.nbytes
    begin("scatter", out, group, detail=f"from {source}", flaw=flaw, checked=checked, payload=sent)
    if group.transport is None:
        assert payload is not None
        return Handle.done(alone(payload.reshape(out.shape), out), group)
    mine = None if payload is None else dense(payload)
    own = output_buffer(out, out.shape, out)
    launch = partial(group.transport.scatter, mine, own, source)
    return start("scatter", group, launch, lambda: copy_out(own, out))


def barrier(group: Group, *, checked: bool = True) -> Handle[None]:
    """Done when every rank of the group has come. Blocks the host when waited for, on NCCL too."""
    begin("barrier", None, group, flaw=None, checked=checked)
    if group.transport is None:
        return Handle.done(None, group)
    return start("barrier", group, group.transport.barrier, lambda: None)
