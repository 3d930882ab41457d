"""`StreamTransport`: the transport of a group of threads under NCCL's rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from torch import Tensor

from parity.stream_rules import Part, StreamOperation, StreamRules
from plait.ranks.transport.buffers import dense
from plait.ranks.transport.call_description import describe
from plait.ranks.transport.interface import Pending
from plait.ranks.transport.threads.cooperative_scheduler import (
    CooperativeScheduler,
    DeadlockError,
    WaitCondition,
)
from plait.ranks.transport.threads.operations import ComputeOutputs, GroupOperations, Inputs
from plait.ranks.transport.threads.transport import ThreadTransport


class StreamPending:
    """An operation that this thread has queued on a stream of its rank."""

    def __init__(self, transport: StreamTransport, operation: StreamOperation, index: int) -> None:
        self._transport, self._operation, self._index = transport, operation, index

    def wait(self, awaited: str = "") -> None:
        """Block, while other ranks' threads run, until the operation is complete.

        Raises RuntimeError where a rank misused its tensors, or made another call.
        """
        operation, rules = self._operation, self._transport.rules
        rules.wait(operation, self._index)
        try:
            self._transport.wait(
                WaitCondition(awaited, partial(rules.is_over, operation), partial(rules.missing, operation))
            )
        except DeadlockError as error:
            cycle = rules.deadlock()
            raise error if cycle is None else DeadlockError(f"deadlock on streams: {cycle}") from None
        if operation.error is not None:
            raise RuntimeError(operation.error)
        operation.deliver(self._index)

    def abandon(self) -> bool:
        """Return False: an operation on a stream cannot be cancelled."""
        return False


class StreamTransport(ThreadTransport):
    """One rank's `Transport` in a group of threads, whose operations run on the streams of `StreamRules`."""

    def __init__(
        self,
        posted: GroupOperations,
        scheduler: CooperativeScheduler,
        index: int,
        timeout: float,
        name: str,
        rules: StreamRules,
    ) -> None:
        """`posted` identifies the group, `name` names it in errors, `rules` has the streams of all ranks."""
        super().__init__(posted, scheduler, index, timeout, name)
        self.rules = rules
        self._messages: dict[tuple[int, int], int] = defaultdict(int)

    def send(self, tensor: Tensor, destination: int, tag: int, label: str = "") -> Pending:
        """Queue a send on the stream of the pair's communicator."""
        return self._message((self.index, destination), Part(dense(tensor.detach()), None), tensor, label)

    def receive(self, buffer: Tensor, source: int, tag: int, label: str = "") -> Pending:
        """Queue a receive on the stream of the pair's communicator."""
        return self._message((source, self.index), Part(None, buffer.detach()), buffer, label)

    def _message(self, ends: tuple[int, int], part: Part, like: Tensor, label: str) -> Pending:
        number = self._messages[ends] = self._messages[ends] + 1
        source, destination = ranks = self.ranks[ends[0]], self.ranks[ends[1]]
        pair: Hashable = "all" if self.rules.device_bound else tuple(sorted(ends))
        name = f"{label or 'a message'} from rank {source} to rank {destination} ({self.name}, {number})"
        index = ends.index(self.index)
        return self._queue(pair, (ends, number), ranks, describe(like), name, _deliver, index, part)

    def _call(
        self, kind: str, read: Tensor | None, written: Tensor | None, compute: ComputeOutputs
    ) -> Pending:
        number = self._count
        self._count += 1
        part = Part(None if read is None else read.detach(), None if written is None else written.detach())
        name = f"{kind} ({self.name}, {number + 1})"
        return self._queue("all", number, self.ranks, kind, name, compute, self.index, part)

    def _queue(
        self,
        communicator: Hashable,
        key: Hashable,
        ranks: Sequence[int],
        kind: str,
        name: str,
        compute: ComputeOutputs,
        index: int,
        part: Part,
    ) -> Pending:
        new = StreamOperation((id(self._posted), communicator), tuple(ranks), kind, name, compute)
        operation = self.rules.operation(new, key)
        self.rules.queue(operation, index, part)
        return StreamPending(self, operation, index)


def _deliver(inputs: Inputs) -> Mapping[int, Tensor]:
    """Return the output of a message: the sent tensor, flat, for index 1, the receiver."""
    sent = inputs[0]
    assert sent is not None
    return {1: sent.view(-1)}
