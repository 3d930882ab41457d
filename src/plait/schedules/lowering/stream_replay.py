"""Replay of communication under NCCL's rules, to find deadlocks without a GPU.

Each rank has a compute stream and, per communicator, one stream that runs its operations in the order in
which they were started:

- an operation starts on a rank when those before it on its stream are complete, and the rank's compute stream
  has reached the point at which the operation was queued;
- it completes when it has started on all its ranks: a send or a receive is one operation of both;
- a wait holds the compute stream, and not the host, which queues everything that follows at once;
- the host blocks where it reads a result, until the compute stream has come there;
- and at the first use of a communicator, until all its ranks have come there.

So a receive that is posted early holds its communicator's stream until the message has arrived. Computing
takes no time here: it holds up nobody for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Operation(NamedTuple):
    """A collective, or a message between two ranks, equal on all ranks that take part in it."""

    communicator: Hashable
    """Operations of one communicator run in order on each rank; different ones are independent."""
    ranks: tuple[int, ...]
    name: str
    """Tells it from the other operations of its communicator, and names it in errors."""


class Queued(NamedTuple):
    """A host's call that queues an operation on its communicator's stream, where it may start later."""

    operation: Operation


class Awaited(NamedTuple):
    """A host's call that makes the compute stream wait for an operation queued before."""

    operation: Operation


class Read(NamedTuple):
    """A host's call that makes the compute stream wait for an operation, and the host for the stream."""

    operation: Operation


Call: TypeAlias = Queued | Awaited | Read


def deadlock_of(calls: Sequence[Sequence[Call]]) -> str | None:
    """Return a text that describes how the ranks' calls deadlock; None if all operations complete.

    `calls` are what each rank's host does in a step, in order.
    """
    replay = _Replay([_RankStreams(one) for one in calls])
    replay.run()
    return replay.cycle()


def first_uses(calls: Sequence[Sequence[Call]], connected: Container[Hashable] = ()) -> list[list[Call]]:
    """Return calls for `deadlock_of` in which each rank's host blocks at first uses of communicators only.

    Hosts and streams do not wait for each other, so each have a replay of their own. `connected` are the
    communicators that all ranks have used before. A communicator's ranks are those of its first operation.
    """
    points: list[list[Call]] = []
    for row in calls:
        ranks_of: dict[Hashable, tuple[int, ...]] = {}
        for operation in (call.operation for call in row):
            ranks_of.setdefault(operation.communicator, operation.ranks)
        uses = (
            Operation(communicator, ranks, f"the connection of {communicator}")
            for communicator, ranks in ranks_of.items()
            if communicator not in connected
        )
        points.append([call for use in uses for call in (Queued(use), Awaited(use))])
    return points


@dataclass
class _RankStreams:
    """One rank's host and streams: the operations queued on each, and how many of them are complete."""

    calls: Sequence[Call]
    """What the rank's host does, in order."""
    done: int = 0
    """The number of calls that the host has made."""
    read: int = 0
    """The number of waits that have to be over before the host makes the next call."""
    waits: list[Operation] = field(default_factory=list)
    """The operations that the compute stream waits for, in order."""
    queued: dict[Hashable, list[tuple[Operation, int]]] = field(default_factory=lambda: defaultdict(list))
    """Per communicator its operations, each with the number of waits that come before it."""
    passed: int = 0
    """The number of waits that are over."""
    completed: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    """Per communicator the number of operations that are complete."""

    def proceed(self, complete: Container[Operation]) -> None:
        """Let host and compute stream go on until both are blocked; `complete`: the complete operations."""
        self._call()
        while (awaited := self.awaited()) is not None and awaited in complete:
            self.passed += 1
            self._call()

    def _call(self) -> None:
        """Make the host's calls up to a read that is not over."""
        while self.done < len(self.calls) and self.passed >= self.read:
            call = self.calls[self.done]
            self.done += 1
            if isinstance(call, Queued):
                self.queued[call.operation.communicator].append((call.operation, len(self.waits)))
                continue
            self.waits.append(call.operation)
            if isinstance(call, Read):
                self.read = len(self.waits)

    def head(self, communicator: Hashable) -> tuple[Operation, int] | None:
        """Return a communicator's first incomplete operation, and the number of waits before it."""
        queue, done = self.queued.get(communicator, ()), self.completed[communicator]
        return queue[done] if done < len(queue) else None

    def awaited(self) -> Operation | None:
        """Return the operation for which the compute stream waits next; None if there is none."""
        return self.waits[self.passed] if self.passed < len(self.waits) else None

    def has_started(self, operation: Operation) -> bool:
        """Return whether `operation`, which is incomplete, has started on this rank."""
        head = self.head(operation.communicator)
        return head is not None and head[0] == operation and head[1] <= self.passed


class _Replay:
    def __init__(self, ranks: Sequence[_RankStreams]) -> None:
        self.ranks = ranks
        self.complete: set[Operation] = set()

    def run(self) -> None:
        """Complete operations until no rank can make progress."""
        todo = dict.fromkeys(range(len(self.ranks)))
        while todo:
            rank, _ = todo.popitem()
            streams = self.ranks[rank]
            streams.proceed(self.complete)
            for communicator in streams.queued:
                head = streams.head(communicator)
                if head is not None and all(self.ranks[each].has_started(head[0]) for each in head[0].ranks):
                    self.complete.add(head[0])
                    for each in head[0].ranks:
                        self.ranks[each].completed[communicator] += 1
                        todo[each] = None

    def cycle(self) -> str | None:
        """Return a sentence with the cycle of waits that blocks operations; None if all complete."""
        stuck = next((one for one in (self._stuck_at(rank) for rank in range(len(self.ranks))) if one), None)
        chain: dict[Operation, str] = {}
        while stuck is not None and stuck not in chain:
            chain[stuck], following = self._reason(stuck)
            if following is None:
                return chain[stuck]
            stuck = following
        if stuck is None:
            return None
        links = list(chain.values())
        return "; ".join(links[list(chain).index(stuck) :])

    def _stuck_at(self, rank: int) -> Operation | None:
        """Return an operation of `rank` that never completes: awaited, or first on a stream; None if none."""
        streams = self.ranks[rank]
        heads = (streams.head(communicator) for communicator in streams.queued)
        return streams.awaited() or next((head[0] for head in heads if head is not None), None)

    def _reason(self, operation: Operation) -> tuple[str, Operation | None]:
        """Return why `operation` never completes, and the operation that blocks it."""
        rank = next(each for each in operation.ranks if not self.ranks[each].has_started(operation))
        streams, name = self.ranks[rank], operation.name
        head, awaited = streams.head(operation.communicator), streams.awaited()
        queue = streams.queued.get(operation.communicator, ())
        if head is not None and head[0] != operation and any(one == operation for one, _ in queue):
            return f"rank {rank} has {name} behind {head[0].name} on one communicator", head[0]
        if awaited is None:
            return f"rank {rank} never starts {name}", None
        return f"rank {rank} starts {name} after its wait for {awaited.name}", awaited
