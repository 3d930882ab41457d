"""Collectives of a group. Each starts at once and returns a handle; several may be in flight.

Every rank of the group makes the same calls in the same order. A `checked` call verifies that first: it
blocks until all ranks have made the call, and raises on every rank if the calls differ. Without the check, as
on the hot path whose shapes were checked before, a mismatch ends the process or hangs until the timeout.

Results are the same bits on every rank and in every run. Ranges are in order of the index. A rank that is
alone gets its own tensor back. Traffic counts the bytes of the tensor that a rank passes, in
`all_to_all_uneven` of what it sends to others. Any call may raise `CommunicationError`: here for its
arguments, from `Handle.wait()` for failures of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks.accelerator import default_device
from plait.ranks.consistency_check import HEADER_BYTES, SIZE_BYTES, require_matching_sizes, require_same_text
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.ranks.transport.buffers import copy_out, dense, output_buffer
from plait.ranks.transport.call_description import describe, dtype_name
from plait.ranks.transport.interface import Pending, RangeSizes
from plait.ranks.transport.rank_order_reduction import Op, reduction_error

T = TypeVar("T")

SMALLEST_SHARED = 2**18
"""Bytes below which a tensor is not shared: a copy costs little, and a mapping takes whole pages."""


def all_reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Start the all-reduce of `tensor` over the group: in place on every rank, or into `out`.

    On the CPU the sum is in rank order, of 16-bit floats in float32, except for large tensors over Gloo
    between hosts. Tensors made by `shared_zeros` are reduced in shared memory.
    """
    error = reduction_error(op, tensor.dtype) or _buffer_error(out, tensor.shape, tensor)
    transport = group.transport
    in_place = out is None and transport is not None and transport.shares(tensor)
    detail = f"{op} in shared memory" if in_place else op
    _check_and_count("all_reduce", tensor, group, detail=detail, error=error, checked=checked)
    if transport is None:
        return Handle.done(_copy_to(tensor, out), group)
    target = tensor if out is None else out
    total = output_buffer(target, tensor.shape, tensor)
    launch = partial(transport.all_reduce, tensor, total, op)
    return _start("all_reduce", group, launch, lambda: copy_out(total, target))


def reduce(
    tensor: Tensor, group: Group, op: Op = "sum", *, destination: int = 0, checked: bool = True
) -> Handle[Tensor]:
    """Start the in-place reduce of `tensor` to index `destination`; on other ranks it becomes undefined."""
    error = reduction_error(op, tensor.dtype) or _index_error(destination, group)
    detail = f"{op} to {destination}"
    _check_and_count("reduce", tensor, group, detail=detail, error=error, checked=checked)
    if group.transport is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)

    def finish() -> Tensor:
        return copy_out(mine, tensor) if group.index == destination else tensor

    return _start("reduce", group, partial(group.transport.reduce, mine, op, destination), finish)


def reduce_scatter(
    tensor: Tensor, group: Group, op: Op = "sum", *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Start the reduce-scatter of `tensor`: `[size * n, ...]` to this rank's `[n, ...]`, in `out` if given.

    On the CPU the sum is in rank order, of 16-bit floats in float32. `out` may be a range of `tensor`.
    """
    shape = _range_shape(tensor, group)
    error = (
        reduction_error(op, tensor.dtype)
        or _division_error(tensor, group)
        or _buffer_error(out, shape, tensor)
    )
    transport = group.transport
    in_place = transport is not None and transport.shares(tensor)
    detail = f"{op} in shared memory" if in_place else op
    _check_and_count("reduce_scatter", tensor, group, detail=detail, error=error, checked=checked)
    if transport is None:
        return Handle.done(_copy_to(tensor, out), group)
    own_range = output_buffer(out, shape, tensor)
    launch = partial(transport.reduce_scatter, tensor, own_range, op)
    return _start("reduce_scatter", group, launch, lambda: copy_out(own_range, out))


def all_gather(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Start the all-gather of the ranks' tensors: `[n, ...]` to `[size * n, ...]`, in `out` if given.

    `tensor` may be this rank's range of `out`. A 0-d tensor counts as `[1]`.
    """
    shape = _whole_shape(tensor, group)
    _check_and_count("all_gather", tensor, group, error=_buffer_error(out, shape, tensor), checked=checked)
    if group.transport is None:
        return Handle.done(_copy_to(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    whole = output_buffer(out, shape, mine)
    launch = partial(group.transport.all_gather, mine, whole)
    return _start("all_gather", group, launch, lambda: copy_out(whole, out))


def all_to_all(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Start the all-to-all of dim 0 in `size` equal parts: part i goes to the rank with index i.

    `[size * n, ...]` to the same shape, in `out` if given, which is other memory than `tensor`.
    """
    error = _division_error(tensor, group) or _buffer_error(out, tensor.shape, tensor)
    _check_and_count("all_to_all", tensor, group, error=error, checked=checked)
    if group.transport is None:
        return Handle.done(_copy_to(tensor, out), group)
    received = output_buffer(out, tensor.shape, tensor)
    launch = partial(group.transport.all_to_all, dense(tensor), received)
    return _start("all_to_all", group, launch, lambda: copy_out(received, out))


def all_to_all_uneven(
    tensor: Tensor,
    group: Group,
    sent: Sequence[int],
    received: Sequence[int],
    *,
    most: int | None = None,
    out: Tensor | None = None,
    checked: bool = True,
) -> Handle[Tensor]:
    """Start the all-to-all of a flat tensor in unequal ranges: `sent[i]` elements go to index i.

    `[sum(sent)]` to `[sum(received)]`, in `out` if given, which is other memory than `tensor`: `received[i]`
    elements from index i, in order of the index. `sent[i]` of the rank at index j is `received[j]` of the
    rank at index i. Sizes may be 0; a rank that neither sends nor receives makes the call too. `most`: a
    number of elements, the same on all ranks, more than which none sends; with it ranks of one host may use
    shared memory. Traffic: an `all_to_all` of the bytes sent to other ranks.
    """
    sizes = RangeSizes(tuple(sent), tuple(received), most)
    shape = (sum(received),)
    error = _sizes_error(sizes, tensor, group) or _buffer_error(out, shape, tensor)
    own = tensor.itemsize * (sum(sent[: group.index]) + sum(sent[group.index + 1 :]))
    detail = "in uneven ranges" + ("" if most is None else f" with most={most}")
    _check_and_count(
        "all_to_all", tensor, group, detail=detail, error=error, checked=checked, payload=own, sizes=sizes
    )
    if group.transport is None:
        return Handle.done(_copy_to(tensor, out), group)
    ranges = output_buffer(out, shape, tensor)
    launch = partial(group.transport.all_to_all, dense(tensor), ranges, sizes)
    return _start("all_to_all", group, launch, lambda: copy_out(ranges, out))


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, checked: bool = True) -> Handle[Tensor]:
    """Start the broadcast of `tensor` from index `source`, which overwrites `tensor` on the other ranks."""
    error = _index_error(source, group)
    _check_and_count("broadcast", tensor, group, detail=f"from {source}", error=error, checked=checked)
    if group.transport is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)
    launch = partial(group.transport.broadcast, mine, source)
    return _start("broadcast", group, launch, lambda: copy_out(mine, tensor))


def gather(
    tensor: Tensor, group: Group, destination: int = 0, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor | None]:
    """Start the gather of the ranks' tensors on the rank with index `destination`; the others get None."""
    shape = _whole_shape(tensor, group)
    error = _index_error(destination, group) or _buffer_error(out, shape, tensor)
    _check_and_count("gather", tensor, group, detail=f"to {destination}", error=error, checked=checked)
    if group.transport is None:
        return Handle.done(_copy_to(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    whole = output_buffer(out, shape, mine) if group.index == destination else None
    launch = partial(group.transport.gather, mine, whole, destination)
    return _start("gather", group, launch, lambda: None if whole is None else copy_out(whole, out))


def scatter(
    ranges: Tensor | None, group: Group, source: int = 0, *, out: Tensor, checked: bool = True
) -> Handle[Tensor]:
    """Start the scatter of the source's `ranges[size * n, ...]`, one range to each rank's `out[n, ...]`.

    `source` is an index in the group; the other ranks may pass `None` (and count no bytes).
    """
    shape = _whole_shape(out, group)
    sends = group.index == source
    error = _index_error(source, group)
    if error is None and sends:
        error = "the source has no ranges" if ranges is None else _buffer_error(ranges, shape, out)
    payload = ranges if sends else None
    sent = 0 if payload is None else payload.nbytes
    detail = f"from {source}"
    _check_and_count("scatter", out, group, detail=detail, error=error, checked=checked, payload=sent)
    if group.transport is None:
        assert payload is not None
        return Handle.done(_copy_to(payload.reshape(out.shape), out), group)
    mine = None if payload is None else dense(payload)
    own = output_buffer(out, out.shape, out)
    launch = partial(group.transport.scatter, mine, own, source)
    return _start("scatter", group, launch, lambda: copy_out(own, out))


def barrier(group: Group, *, checked: bool = True) -> Handle[None]:
    """Start a barrier: `wait()` blocks the host, on NCCL too, until all ranks have called `barrier`."""
    _check_and_count("barrier", None, group, error=None, checked=checked)
    if group.transport is None:
        return Handle.done(None, group)
    return _start("barrier", group, group.transport.barrier, lambda: None)


def shared_zeros(size: int, dtype: torch.dtype, device: torch.device, group: Group | None) -> Tensor:
    """Return zeros `[size]`, in memory shared by the group's ranks if large and supported; all call it.

    Over Gloo the ranks of one host send through the loopback interface, which copies each byte several times
    and takes processor time from the step itself. Every rank of the group maps the tensors made here; in
    `all_reduce` each rank then reduces its range of all ranks' tensors, in rank order, and writes it back to
    all of them, between two barriers.

    It is supported on the CPU under Linux, for ranks on one host. All ranks of the group call it in the same
    order with the same arguments; it blocks until all have. Communication: one message to each other rank,
    not counted as traffic. The storage of a shared tensor cannot be resized. Resident memory includes the
    pages of peers' tensors that a rank touches. Raises `CommunicationError` where a rank is gone or does not
    take part within the group's timeout.
    """
    nbytes = size * dtype.itemsize
    transport = None if group is None else group.transport
    if group is None or transport is None or device.type != "cpu" or nbytes < SMALLEST_SHARED:
        return torch.zeros(size, dtype=dtype, device=device)
    awaited = f"shared memory over {group.name} with ranks {', '.join(map(str, group.ranks))}"
    made: list[Tensor | None] = []

    def start() -> None:
        made.append(transport.shared_zeros(size, dtype, awaited))

    shared = Handle(start, made.pop, awaited, group).wait()
    return torch.zeros(size, dtype=dtype, device=device) if shared is None else shared


def _check_and_count(
    kind: str,
    tensor: Tensor | None,
    group: Group,
    *,
    detail: str = "",
    error: str | None,
    checked: bool,
    payload: int | None = None,
    sizes: RangeSizes | None = None,
) -> None:
    """Count a call as traffic; first raise if `error` is set or, if `checked`, the ranks' calls differ.

    `payload` is in bytes, by default those of `tensor`. With `sizes`, each size that is sent is compared with
    that received, in place of the shapes. In a guarded group every call is checked, and the check counts as
    traffic. Raises `CommunicationError`.
    """
    alone = group.transport is None
    checked = checked or group.guarded
    if error or (checked and not alone):
        what = None
        if tensor is not None:
            what = f"of {describe(tensor) if sizes is None else dtype_name(tensor.dtype)}"
        call = " ".join(part for part in (kind, detail, what, error and f"but {error}") if part)
        if checked and not alone:
            device = default_device() if tensor is None else tensor.device
            require_same_text(call, group, device)
            if sizes is not None and not error:
                require_matching_sizes(sizes, call, group, device)
        if error:
            sentence = f"rank {group.rank} cannot call {call} over {group.name}: correct the arguments."
            raise CommunicationError(sentence)
    if alone and tensor is not None:
        group.skip(kind, tensor)
    elif not alone:
        if group.guarded:
            of_sizes = 0 if sizes is None else SIZE_BYTES * group.size
            group.traffic.record(group.name, "guard", HEADER_BYTES + of_sizes)
        size = 0 if tensor is None else tensor.nbytes
        group.traffic.record(group.name, kind, size if payload is None else payload)


def _start(kind: str, group: Group, launch: Callable[[], Pending], finish: Callable[[], T]) -> Handle[T]:
    return Handle(launch, finish, f"{kind} over {group.with_others}", group)


def _copy_to(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `result` of a collective in a group of one rank, or `out` after copying `result` to it."""
    return result if out is None else out.detach().copy_(result)


def _whole_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """Return the shape of all ranks' tensors concatenated along dim 0."""
    first, *rest = tensor.shape or (1,)
    return (group.size * first, *rest)


def _range_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """Return the shape of one rank's range: `tensor` divided along dim 0 into one equal range per rank."""
    first, *rest = tensor.shape or (0,)
    return (first // group.size, *rest)


def _division_error(tensor: Tensor, group: Group) -> str | None:
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        return f"dim 0 does not divide into {group.size} equal ranges"
    return None


def _sizes_error(sizes: RangeSizes, tensor: Tensor, group: Group) -> str | None:
    """Return why `tensor` does not divide into ranges of `sizes`, one per rank of the group, or None."""
    if tensor.dim() != 1:
        return f"the tensor has {tensor.dim()} dims and not 1"
    if len(sizes.sent) != group.size or len(sizes.received) != group.size:
        numbers = f"{len(sizes.sent)} ranges are sent and {len(sizes.received)} received"
        return f"{numbers}, and the group has {group.size} ranks"
    if min(*sizes.sent, *sizes.received) < 0:
        return f"sizes are negative (sent {list(sizes.sent)}, received {list(sizes.received)})"
    if sizes.most is not None and sum(sizes.sent) > sizes.most:
        return f"{sum(sizes.sent)} elements are sent and `most` is {sizes.most}"
    if sum(sizes.sent) != tensor.numel():
        return f"the ranges sent have {sum(sizes.sent)} elements and the tensor {tensor.numel()}"
    sent, received = sizes.sent[group.index], sizes.received[group.index]
    return None if sent == received else f"it sends {sent} elements to itself and receives {received}"


def _buffer_error(buffer: Tensor | None, shape: Sequence[int], like: Tensor) -> str | None:
    if buffer is None or (buffer.shape == torch.Size(shape) and buffer.dtype == like.dtype):
        return None
    wanted = f"{dtype_name(like.dtype)}{list(shape)}"
    return f"the buffer of the whole or the range is {describe(buffer)} and not {wanted}"


def _index_error(index: int, group: Group) -> str | None:
    return None if 0 <= index < group.size else f"the group has indices 0 to {group.size - 1} only"
