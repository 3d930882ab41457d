"""Transport between ranks that are threads: `ThreadTransport` of one group; `ThreadTransports` makes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread, current_thread
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plait.ranks.transport.call_description import describe, dtype_name
from plait.ranks.transport.interface import Pending, RangeSizes, RankTransports
from plait.ranks.transport.rank_order_reduction import Op
from plait.ranks.transport.threads import operations
from plait.ranks.transport.threads.cooperative_scheduler import CooperativeScheduler, WaitCondition
from plait.ranks.transport.threads.operations import CollectiveCall, ComputeOutputs, GroupOperations, Transfer

Key = tuple[tuple[int, ...], int]
"""The ranks of a group, and its number among the groups of the same ranks."""


@dataclass(eq=False)
class ThreadPending:
    """A collective or message that this thread has started; waiting for it writes the output."""

    transport: ThreadTransport
    operation: CollectiveCall | Transfer
    written: Tensor | None
    missing: Callable[[], Sequence[int]]

    def wait(self, awaited: str = "") -> None:
        """Run other ranks until the operation ends, then write its output. Raises the scheduler's errors."""
        self.transport.wait(WaitCondition(awaited, lambda: self.operation.over, self.missing))
        if self.operation.error is not None:
            raise RuntimeError(self.operation.error)
        output = self.operation.output(self.transport.index)
        if output is not None and self.written is not None:
            self.written.view(-1).copy_(output)

    def abandon(self) -> bool:
        """Discard the result; return whether the other ranks need no more of this rank's tensors."""
        return self.operation.release(self.transport.index)


class ThreadTransport:
    """One rank's `Transport` in a group whose ranks are threads of this process."""

    carries_cpu_tensors = True
    on_one_host = True

    def __init__(
        self, posted: GroupOperations, scheduler: CooperativeScheduler, index: int, timeout: float, name: str
    ) -> None:
        self.ranks, self.index, self.name = posted.ranks, index, name
        self._posted, self._scheduler, self._timeout = posted, scheduler, timeout
        self._count = 0

    def wait(self, condition: WaitCondition) -> None:
        """Run the other ranks until `condition` is met."""
        self._scheduler.wait(self.ranks[self.index], condition, self._timeout)

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start an all-reduce, summed in rank order."""
        reduced = partial(operations.all_reduce, op)
        return self._call(f"all_reduce {op} {describe(tensor)}", tensor, total, reduced)

    def reduce(self, tensor: Tensor, op: Op, destination: int) -> Pending:
        """Start a reduction in rank order; the other ranks' tensors do not change."""
        written = tensor if self.index == destination else None
        kind = f"reduce {op} to {destination} {describe(tensor)}"
        return self._call(kind, tensor, written, partial(operations.all_reduce, op))

    def reduce_scatter(self, tensor: Tensor, own_range: Tensor, op: Op) -> Pending:
        """Start a reduce-scatter, summed in rank order."""
        reduced = partial(operations.reduce_scatter, op)
        return self._call(f"reduce_scatter {op} {describe(tensor)}", tensor, own_range, reduced)

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start an all-gather."""
        return self._call(f"all_gather {describe(tensor)}", tensor, whole, operations.all_gather)

    def all_to_all(self, tensor: Tensor, received: Tensor, sizes: RangeSizes | None = None) -> Pending:
        """Start an all-to-all; a rank that does not expect what another sends to it is an error on both."""
        kind = describe(tensor) if sizes is None else f"in uneven ranges {dtype_name(tensor.dtype)}"
        equal = (tensor.numel() // len(self.ranks),) * len(self.ranks)
        mine = sizes or RangeSizes(equal, equal)
        of_all = self._posted.add_range_sizes(self._count, self.index, mine)
        return self._call(f"all_to_all {kind}", tensor, received, partial(operations.all_to_all, of_all))

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start a broadcast."""
        kind = f"broadcast from {source} {describe(tensor)}"
        written = None if self.index == source else tensor
        return self._call(kind, tensor, written, partial(operations.broadcast, source))

    def gather(self, tensor: Tensor, whole: Tensor | None, destination: int) -> Pending:
        """Start a gather."""
        return self._call(f"gather to {destination} {describe(tensor)}", tensor, whole, operations.all_gather)

    def scatter(self, ranges: Tensor | None, own: Tensor, source: int) -> Pending:
        """Start a scatter."""
        scattered = partial(operations.scatter, source)
        return self._call(f"scatter from {source} {describe(own)}", ranges, own, scattered)

    def barrier(self) -> Pending:
        """Start a barrier."""
        return self._call("barrier", None, None, lambda inputs: {})

    def send(self, tensor: Tensor, destination: int, tag: int, label: str = "") -> Pending:
        """Start a send, complete when the receive is posted."""
        message = self._posted.transfer((self.index, destination, tag), sent=tensor.detach())
        return ThreadPending(self, message, None, lambda: (self.ranks[destination],))

    def receive(self, buffer: Tensor, source: int, tag: int, label: str = "") -> Pending:
        """Post a receive."""
        message = self._posted.transfer((source, self.index, tag), buffer=buffer)
        return ThreadPending(self, message, buffer, lambda: (self.ranks[source],))

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Return None: threads need no shared memory, since they share all of it."""
        return None

    def shares(self, tensor: Tensor) -> bool:
        """Return False: no tensor is made by `shared_zeros`."""
        return False

    def abort(self, cause: Exception) -> None:
        """Do nothing: the scheduler ends ranks that wait for a failed rank."""

    def _call(
        self, kind: str, read: Tensor | None, written: Tensor | None, compute: ComputeOutputs
    ) -> Pending:
        call = self._posted.call(self._count, kind)
        self._count += 1
        call.join(self.index, kind, None if read is None else read.detach(), compute)
        written = None if written is None else written.detach()
        ranks = self.ranks
        return ThreadPending(
            self, call, written, lambda: [ranks[i] for i in range(len(ranks)) if i not in call.inputs]
        )


MakeTransport: TypeAlias = Callable[[GroupOperations, CooperativeScheduler, int, float, str], ThreadTransport]


class ThreadTransports(RankTransports):
    """Makes one rank's `ThreadTransport` for each of its groups; ranks are threads of one process."""

    def __init__(
        self,
        rank: int,
        scheduler: CooperativeScheduler,
        groups: dict[Key, GroupOperations],
        shared_results: dict[Hashable, Any],
        make_transport: MakeTransport = ThreadTransport,
    ) -> None:
        """`groups`, `shared_results`: dictionaries that all ranks of the process share."""
        self.shared_results = shared_results
        self._make_transport = make_transport
        self.rank, self.size = rank, scheduler.size
        self._scheduler, self._groups = scheduler, groups
        self._made: dict[tuple[int, ...], int] = {}

    def connect(
        self, groups: Sequence[tuple[int, ...]], name: str, timeout: float, max_ctas: int | None = None
    ) -> ThreadTransport | None:
        """Return this rank's transport in the group of `groups` that contains it, or None."""
        mine = next((ranks for ranks in groups if self.rank in ranks and len(ranks) > 1), None)
        if mine is None:
            return None
        number = self._made[mine] = self._made.get(mine, 0) + 1
        posted = self._groups.setdefault((mine, number), GroupOperations(mine))
        return self._make_transport(posted, self._scheduler, mine.index(self.rank), timeout, name)

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, after running the other ranks."""
        self._scheduler.pause(self.rank, seconds)


class RankThread(Thread):
    """A thread that runs one rank; `current_thread_rank` returns that rank inside it."""

    def __init__(self, rank: ThreadTransports, run: Callable[[], None]) -> None:
        super().__init__(target=run, name=f"plait-rank-{rank.rank}", daemon=True)
        self.rank = rank


def current_thread_rank() -> ThreadTransports | None:
    """Return the `ThreadTransports` of the rank that the calling thread runs; None if it runs none."""
    thread = current_thread()
    return thread.rank if isinstance(thread, RankThread) else None
