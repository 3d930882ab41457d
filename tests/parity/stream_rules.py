"""NCCL's rules for ranks as threads: communicators run their operations in order, on a stream of each rank.

`StreamRules` holds the streams of all ranks. An operation starts on a rank when those queued before it on the
communicator are complete, and completes when it has started on all its ranks, as programs are replayed by
`plait.schedules.lowering.stream_replay`. Three things then turn a mistake into an error or a wrong number,
whatever the moment at which a real GPU would complete the operation:

- outputs hold NaN (integers -1) from the start of an operation until it is complete;
- inputs must be the same at completion as at the start, and their memory still be allocated;
- a rank must wait for each operation before it ends.

A thread blocks in `wait`, where on a GPU the compute stream does: what a rank queues afterwards cannot start
before in either case, once all communicators are connected.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from plait.ranks.transport.threads.operations import ComputeOutputs
from plait.schedules.lowering.stream_replay import Awaited, Call, Operation, Queued, deadlock_of

Completion: TypeAlias = Literal["early", "late"] | int
"""When operations complete: as soon as they can, only when a rank waits for them, or drawn from a seed."""


@dataclass
class Part:
    """One rank's part of an operation: the input and its value at the start, and the output."""

    read: Tensor | None
    written: Tensor | None
    value: Tensor | None = field(init=False, default=None)
    unchanged: bool = field(init=False, default=False)
    """Whether the input must keep its value: no output is in its memory."""

    def __post_init__(self) -> None:
        if self.read is not None:
            self.value = self.read.detach().clone()
        if self.written is not None:
            poison(self.written)
        if self.read is not None and self.value is not None:
            self.unchanged = self.written is None or not _overlap(self.read, self.written)
            if self.written is not None and not self.unchanged and self.read.nbytes < self.written.nbytes:
                self.read.copy_(self.value)  # an all-gather in place leaves this rank's own range as it is
                self.unchanged = True

    def breach(self) -> str | None:
        """Return how the rank misused its tensors before completion, e.g. "wrote to the input", or None."""
        for tensor, what in ((self.read, "input"), (self.written, "output")):
            if tensor is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
                return f"freed the {what}"
        if self.unchanged and not _same_bits(self.read, self.value):
            return "wrote to the input"
        return None


@dataclass(eq=False)
class StreamOperation:
    """A collective or a message of ranks as threads, queued on a stream of each rank as on NCCL."""

    communicator: Hashable
    ranks: tuple[int, ...]
    """Global ranks, in order of their index."""
    kind: str
    name: str
    compute: ComputeOutputs
    parts: dict[int, Part] = field(default_factory=dict)
    """By index."""
    outputs: dict[int, Tensor] | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether the operation is complete, or has failed."""
        return self.outputs is not None or self.error is not None

    @property
    def as_call(self) -> Operation:
        """This operation as an `Operation`, the type that `deadlock_of` takes."""
        return Operation(self.communicator, tuple(sorted(self.ranks)), self.name)

    def complete(self) -> None:
        """Compute the outputs from the inputs.

        Sets `error` if a rank misused its input or output tensor, or `compute` raises RuntimeError.
        """
        for index, part in sorted(self.parts.items()):
            breach = part.breach()
            if breach is not None:
                self.error = f"rank {self.ranks[index]} {breach} of {self.name} before it was complete"
                return
        values = {index: part.value for index, part in sorted(self.parts.items())}
        try:
            with torch.no_grad():
                self.outputs = dict(self.compute(values))
        except RuntimeError as error:
            self.error = str(error)

    def deliver(self, index: int) -> None:
        """Copy the output of the rank at `index` to its output tensor, if it has one."""
        written = self.parts[index].written
        if self.outputs is not None and written is not None and index in self.outputs:
            written.view(-1).copy_(self.outputs.pop(index))


class StreamRules:
    """Imitation of NCCL for ranks as threads: the streams of all ranks, and the operations queued on them."""

    def __init__(self, completion: Completion = "late", *, device_bound: bool = False) -> None:
        """Make empty streams. `completion`: "early", "late" or a random seed; see `Completion`.

        `device_bound`: as if `init_process_group` had been given a `device_id`, so that the messages of a
        group share the communicator of its collectives, instead of one for each pair of ranks.
        """
        self.device_bound = device_bound
        self._completion = completion
        self._random = Random(completion if isinstance(completion, int) else 0)
        self._streams: dict[tuple[Hashable, int], deque[StreamOperation]] = defaultdict(deque)
        self._calls: dict[int, list[Call]] = defaultdict(list)
        self._operations: dict[tuple[Hashable, Hashable], StreamOperation] = {}

    def operation(self, new: StreamOperation, key: Hashable) -> StreamOperation:
        """Return the operation that another rank has queued on the same communicator under `key`, else `new`.

        It fails on all its ranks where they make different calls.
        """
        known = self._operations.setdefault((new.communicator, key), new)
        if known.kind != new.kind:
            known.error = f"the ranks make different calls: {known.kind} and {new.kind}"
        return known

    def queue(self, operation: StreamOperation, index: int, part: Part) -> None:
        """Append an operation, with this rank's part of it, to the rank's stream of the communicator."""
        rank = operation.ranks[index]
        operation.parts[index] = part
        if len(operation.parts) == len(operation.ranks):
            self._operations = {key: one for key, one in self._operations.items() if one is not operation}
        self._streams[operation.communicator, rank].append(operation)
        self._calls[rank].append(Queued(operation.as_call))
        if self._completion != "late":
            self._complete_some()

    def wait(self, operation: StreamOperation, index: int) -> None:
        """Record that a rank's compute stream waits for an operation."""
        self._calls[operation.ranks[index]].append(Awaited(operation.as_call))
        if isinstance(self._completion, int):
            self._complete_some()

    def is_over(self, operation: StreamOperation) -> bool:
        """Complete `operation`, and those queued before it, if possible; return whether it is complete."""
        return self._force(operation, set())

    def missing(self, operation: StreamOperation) -> Sequence[int]:
        """Return the ranks that did not queue `operation`; if all did, those with another operation ahead."""
        here = {operation.ranks[index] for index in operation.parts}
        absent = [rank for rank in operation.ranks if rank not in here]
        return absent or [rank for rank in operation.ranks if self._head(operation, rank) is not operation]

    def deadlock(self) -> str | None:
        """Return the cycle of waits between the ranks' streams, as a sentence; None if there is none."""
        return deadlock_of([self._calls[rank] for rank in range(max(self._calls) + 1)])

    def require_awaited(self, rank: int) -> None:
        """Raise RuntimeError where a rank ends without having waited for one of its operations."""
        awaited = {call.operation for call in self._calls[rank] if isinstance(call, Awaited)}
        for call in self._calls[rank]:
            if call.operation not in awaited:
                raise RuntimeError(f"rank {rank} ended and has not waited for {call.operation.name}")

    def _head(self, operation: StreamOperation, rank: int) -> StreamOperation | None:
        stream = self._streams[operation.communicator, rank]
        return stream[0] if stream else None

    def _ready(self) -> Iterator[StreamOperation]:
        """Yield the operations that have started on all their ranks."""
        for stream in list(self._streams.values()):
            if stream and len(stream[0].parts) == len(stream[0].ranks):
                operation = stream[0]
                if all(self._head(operation, rank) is operation for rank in operation.ranks):
                    yield operation

    def _complete_some(self) -> None:
        """Complete all operations that can complete; if `completion` is a seed, a random choice of them."""
        drawn = isinstance(self._completion, int)
        while ready := list(dict.fromkeys(self._ready())):
            chosen = [one for one in ready if not drawn or self._random.random() < 0.5]
            for operation in chosen:
                self._complete(operation)
            if not chosen:
                return

    def _force(self, operation: StreamOperation, behind: set[StreamOperation]) -> bool:
        if operation.over:
            return True
        if operation in behind or len(operation.parts) < len(operation.ranks):
            return False
        for rank in operation.ranks:
            while (head := self._head(operation, rank)) is not operation:
                if head is None or not self._force(head, behind | {operation}):
                    return False
        self._complete(operation)
        return True

    def _complete(self, operation: StreamOperation) -> None:
        operation.complete()
        for index, rank in enumerate(operation.ranks):
            self._streams[operation.communicator, rank].popleft()
            if self._completion != "late":
                operation.deliver(index)


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with NaN, integers with -1."""
    with torch.no_grad():
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else -1)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not one.numel():
        return False
    starts = [tensor.data_ptr() for tensor in (one, other)]
    return starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
