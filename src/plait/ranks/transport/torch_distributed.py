"""Transport over process groups of `torch.distributed`: Gloo for tensors on the CPU, NCCL for those on GPUs.

Gloo's reduce-scatter is a whole all-reduce, and its all-reduce of a small tensor is slower than an all-to-all
exchange of the ranks' tensors, which each rank then reduces in rank order (`benchmarks/collectives` measures
each choice).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Literal, Never, cast

import torch
import torch.distributed as dist
from torch import Tensor

from plait.ranks.accelerator import current_accelerator
from plait.ranks.transport.buffers import as_bytes, dense
from plait.ranks.transport.interface import Pending, RangeSizes
from plait.ranks.transport.rank_order_reduction import Op, divide_mean, fold

EXCHANGE_LIMIT = 2**20
"""Bytes that a rank sends in an exchange, up to which it is preferred to Gloo's ring all-reduce."""

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
"""A collective with several algorithms."""
REDUCTIONS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")
"""Those that have algorithms over Gloo, and in place in shared memory."""
Algorithm = Literal["in place", "whole", "ranges", "exchange", "backend"]
"""The algorithm of a collective: in shared memory, in place; staged in shared memory, where each rank reduces
all of it, or one range for all ranks; an all-to-all exchange that each rank reduces; the backend's own."""

_LONGEST_TIMEOUT = 1e9
"""Seconds: torch cannot take an infinite number of them."""
_WARNS_OF_ORDER = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Whether torch warns that a group's messages, each by itself, are sent in the order of their calls.

So they are meant to be: a group of two ranks sends in one direction.
"""
_Single = Callable[..., "dist.Work | None"]


class TorchPending:
    """A pending `Work` of torch, with tensors to keep alive; `wait` ends with a call of `then`, if given."""

    def __init__(self, work: dist.Work | None, *keep: Tensor | None, then: Callable[[], None] | None = None):
        self._work, self._keep, self._then = work, keep, then

    def wait(self, awaited: str = "") -> None:
        """Block until the operation is complete; on NCCL, only make the current stream wait for it."""
        if self._work is not None:
            self._work.wait()
        if self._then is not None:
            self._then()

    def abandon(self) -> bool:
        """Return False: an operation of torch cannot be cancelled."""
        return False


class TorchTransport:
    """The `Transport` over one process group of `torch.distributed`."""

    on_one_host: ClassVar[bool] = False

    def __init__(self, process_group: dist.ProcessGroup, index: int) -> None:
        self.process_group = process_group
        self.size = process_group.size()
        self.index = index

    def forget_process_group(self) -> None:
        """Delete the reference to the process group, so that torch can free it; no operation can follow."""
        del self.process_group

    def __getattr__(self, name: str) -> Never:
        if name == "process_group":
            raise ConnectionError("the world of its group has failed: make a new mesh")
        raise AttributeError(name)

    @cached_property
    def carries_cpu_tensors(self) -> bool:
        """Whether CPU tensors can be sent: the group has the Gloo backend."""
        return "cpu:gloo" in backends_of(self.process_group)

    def algorithm(self, collective: Collective, tensor: Tensor) -> Algorithm:
        """Return the algorithm of a collective; it depends on device, backend and size only."""
        over_gloo = tensor.device.type == "cpu" and self.carries_cpu_tensors
        if not over_gloo or collective not in REDUCTIONS:
            return "backend"
        large = tensor.nbytes * self.size > EXCHANGE_LIMIT
        return "backend" if collective == "all_reduce" and large else "exchange"

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start an all-reduce: by an all-to-all and local sums where that is faster, else by the backend."""
        if self.algorithm("all_reduce", tensor) == "exchange":
            copies = tensor.detach().expand(self.size, *tensor.shape).contiguous()
            return self._exchange(copies, total, op)
        if total.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
            total.copy_(tensor.detach())
        work = dist.all_reduce(total, _native(op), self.process_group, async_op=True)
        return TorchPending(work, total, then=lambda: divide_mean(total, op, self.size))

    def reduce(self, tensor: Tensor, op: Op, destination: int) -> Pending:
        """Start a reduce, in the backend's order of sums."""
        work = dist.reduce(
            tensor, op=_native(op), group=self.process_group, async_op=True, group_dst=destination
        )

        def finish() -> None:
            if self.index == destination:
                divide_mean(tensor, op, self.size)

        return TorchPending(work, tensor, then=finish)

    def reduce_scatter(self, tensor: Tensor, own_range: Tensor, op: Op) -> Pending:
        """Start a reduce-scatter: in rank order on the CPU, in the backend's order elsewhere."""
        mine = dense(tensor)
        if self.algorithm("reduce_scatter", tensor) == "exchange":
            return self._exchange(mine, own_range, op)
        work = _single("reduce_scatter_single", dist.reduce_scatter_tensor)(
            own_range, mine, op=_native(op), group=self.process_group, async_op=True
        )
        return TorchPending(work, mine, own_range, then=lambda: divide_mean(own_range, op, self.size))

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start an all-gather by one call of the backend."""
        mine = dense(tensor)
        work = _single("all_gather_single", dist.all_gather_into_tensor)(
            as_bytes(whole), as_bytes(mine), group=self.process_group, async_op=True
        )
        return TorchPending(work, mine, whole)

    def all_to_all(self, tensor: Tensor, received: Tensor, sizes: RangeSizes | None = None) -> Pending:
        """Start an all-to-all by one call of the backend."""
        mine = dense(tensor)
        return TorchPending(self._swap(mine, received, sizes), mine, received)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start a broadcast by one call of the backend."""
        work = dist.broadcast(as_bytes(tensor), group=self.process_group, async_op=True, group_src=source)
        return TorchPending(work, tensor)

    def gather(self, tensor: Tensor, whole: Tensor | None, destination: int) -> Pending:
        """Start a gather by one call of the backend."""
        mine = dense(tensor)
        ranges = None if whole is None else list(as_bytes(whole).tensor_split(self.size))
        work = dist.gather(
            as_bytes(mine), ranges, group=self.process_group, async_op=True, group_dst=destination
        )
        return TorchPending(work, mine, whole)

    def scatter(self, ranges: Tensor | None, own: Tensor, source: int) -> Pending:
        """Start a scatter by one call of the backend."""
        mine = None if ranges is None else dense(ranges)
        parts = None if mine is None else list(as_bytes(mine).tensor_split(self.size))
        work = dist.scatter(as_bytes(own), parts, group=self.process_group, async_op=True, group_src=source)
        return TorchPending(work, mine, own)

    def barrier(self) -> Pending:
        """Start a barrier; on NCCL its wait blocks the host."""
        return TorchPending(dist.barrier(self.process_group, async_op=True))

    def send(self, tensor: Tensor, destination: int, tag: int, label: str = "") -> Pending:
        """Start a send, complete when the other rank has posted its receive."""
        mine = dense(tensor)
        work = dist.isend(as_bytes(mine), group=self.process_group, tag=tag, group_dst=destination)
        return TorchPending(work, mine)

    def receive(self, buffer: Tensor, source: int, tag: int, label: str = "") -> Pending:
        """Post a receive; NCCL ignores the tag."""
        work = dist.irecv(as_bytes(buffer), group=self.process_group, tag=tag, group_src=source)
        return TorchPending(work, buffer)

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Return None: shared memory is not supported."""
        return None

    def shares(self, tensor: Tensor) -> bool:
        """Return False: no tensor is made by `shared_zeros`."""
        return False

    def abort(self, cause: Exception) -> None:
        """Do nothing: torch's timeouts end pending operations."""

    def _swap(self, parts: Tensor, received: Tensor, sizes: RangeSizes | None = None) -> dist.Work | None:
        work: dist.Work | None = dist.all_to_all_single(
            as_bytes(received),
            as_bytes(parts),
            None if sizes is None else [size * parts.itemsize for size in sizes.received],
            None if sizes is None else [size * parts.itemsize for size in sizes.sent],
            group=self.process_group,
            async_op=True,
        )
        return work

    def _exchange(self, parts: Tensor, total: Tensor, op: Op) -> Pending:
        """Send one of `size` parts along dim 0 to each rank, and reduce the received parts into `total`."""
        received = torch.empty_like(parts)

        def finish() -> None:
            fold(received.view(-1).tensor_split(self.size), op, total.view(-1))

        return TorchPending(self._swap(parts, received), parts, then=finish)


def backends_of(process_group: dist.ProcessGroup | None) -> str:
    """Return the backends of a group, for example "cpu:gloo,cuda:nccl"."""
    return dist.distributed_c10d.get_backend_config(process_group)


def torch_timeout(seconds: float) -> timedelta:
    """Return `seconds` as a timeout for torch, which takes no infinite one: then about 30 years."""
    return timedelta(seconds=min(float(seconds), _LONGEST_TIMEOUT))


def splits_communicators() -> bool:
    """Return whether new groups are split from the world's NCCL communicator: then all ranks must take part.

    So it is where `init_process_group` was given a `device_id`.
    """
    return dist.distributed_c10d._get_default_group().bound_device_id is not None


def new_process_group(
    ranks: tuple[int, ...], name: str, description: str, timeout: float, max_ctas: int | None = None
) -> dist.ProcessGroup | None:
    """Return a process group with the world's backends; None if this rank is not among `ranks`.

    Only `ranks` take part, in this order of indices (with `splits_communicators` all ranks of the world). In
    place of `dist.new_group`, which gives a group of its members the name of an earlier one that is
    destroyed, whose addresses are still in the store. `timeout`: seconds. `max_ctas`: the most thread blocks
    of a kernel of NCCL, for a group that only sends and receives; None: as many as NCCL chooses.
    """
    c10d, rank = dist.distributed_c10d, dist.get_rank()
    world = c10d._get_default_group()
    backend, store = c10d._world.pg_map[world]
    index: Any = ranks.index(rank) if rank in ranks else None
    options = _nccl_options(max_ctas, torch_timeout(timeout))
    device = world.bound_device_id
    if options is not None:
        # Connected now, messages use the group's communicator; else each sender would make one of its own.
        device = device or current_accelerator()
        os.environ.setdefault(_WARNS_OF_ORDER, "false")
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        index,
        list(ranks),
        dist.Backend(backend),
        store,
        cast(Any, name),
        timeout=torch_timeout(timeout),
        backend_options=options,
        device_id=device,
        group_desc=description,
    )
    if index is None:
        return None
    c10d._world.pg_group_ranks[made] = {each: number for number, each in enumerate(ranks)}
    return cast(dist.ProcessGroup, made)


def _nccl_options(max_ctas: int | None, timeout: timedelta) -> Any:
    """Return NCCL's options with at most `max_ctas` thread blocks a kernel; None for the defaults."""
    if max_ctas is None or "nccl" not in backends_of(None):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options._timeout = timeout
    return options


def set_timeout(process_group: dist.ProcessGroup, device: torch.device, seconds: float) -> None:
    """Set the timeout, in seconds, of a process group's later operations by its backend for `device`."""
    backend = process_group._get_backend(device)
    change = getattr(backend, "set_timeout", None) or backend._set_default_timeout  # since 2.13, and before
    change(torch_timeout(seconds))


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return a process group's timeout in seconds, that of its backend for `device`; None if unknown."""
    try:
        limit = getattr(process_group._get_backend(device).options, "_timeout", None)
    except (AttributeError, RuntimeError):  # a backend without options
        limit = None
    if limit is None:
        return None
    return math.inf if limit >= torch_timeout(math.inf) else float(limit.total_seconds())


def _single(name: str, older: _Single) -> _Single:
    """Return the function `name` of `torch.distributed`, or `older` where this version of torch lacks it.

    torch 2.13 deprecates the older functions.
    """
    return cast(_Single, getattr(dist, name, None) or older)


def _native(op: Op) -> dist.ReduceOp.RedOpType:
    """Return torch's reduction for `op`; for a mean the sum, which the caller divides afterwards."""
    return {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,
        "product": dist.ReduceOp.PRODUCT,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }[op]
