"""A group among threads, seen from one rank, and the ranks themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import Thread, current_thread
from typing import Any

import torch
from torch import Tensor

from plait.comm.buffers import describe
from plait.comm.last_words import LastWords
from plait.comm.transport.interface import Pending
from plait.comm.transport.local import calls
from plait.comm.transport.local.calls import Board, Call, Transfer, WorkOut
from plait.comm.transport.local.turns import Turns, Wait
from plait.comm.transport.reduction import Op

Key = tuple[tuple[int, ...], int]
"""The ranks of a group, and how many groups of the same ranks were made before it."""


class LocalPending:
    """A collective that this thread takes part in."""

    def __init__(self, transport: LocalTransport, call: Call, written: Tensor | None) -> None:
        self._transport, self._call, self._written = transport, call, written

    def wait(self, awaited: str = "") -> None:
        """Let other ranks run until it is over, then write the result. Raises as `Turns.wait`."""
        self._transport.wait(Wait(awaited, lambda: self._call.over, self._missing))
        if self._call.error is not None:
            raise RuntimeError(self._call.error)
        result = self._call.result(self._transport.index)
        if result is not None and self._written is not None:
            self._written.view(-1).copy_(result)

    def abandon(self) -> bool:
        """True: it goes on without this rank's tensors."""
        self._call.withdraw(self._transport.index)
        return True

    def _missing(self) -> Sequence[int]:
        return [rank for index, rank in enumerate(self._transport.ranks) if index not in self._call.handed]


class LocalMessage:
    """A message that this thread sends, or receives into `buffer`."""

    def __init__(
        self, transport: LocalTransport, message: Transfer, peer: int, buffer: Tensor | None
    ) -> None:
        self._transport, self._message, self._peer, self._buffer = transport, message, peer, buffer

    def wait(self, awaited: str = "") -> None:
        """Let other ranks run until both are there; fill the buffer. Raises as `Turns.wait`."""
        self._transport.wait(Wait(awaited, lambda: self._message.over, lambda: (self._peer,)))
        if self._message.error is not None:
            raise RuntimeError(self._message.error)
        if self._buffer is not None and self._message.received is not None:
            self._buffer.view(-1).copy_(self._message.received)

    def abandon(self) -> bool:
        """False, unless it is over: it stays posted."""
        return self._message.over


class LocalTransport:
    """One rank's view of a group of threads. See `Transport`."""

    carries_cpu_tensors = True
    on_one_host = True

    def __init__(self, board: Board, turns: Turns, index: int, timeout: float) -> None:
        self.ranks, self.index = board.ranks, index
        self._board, self._turns, self._timeout = board, turns, timeout
        self._count = 0

    def wait(self, wait: Wait) -> None:
        """Let the other ranks run until `wait` is ready."""
        self._turns.wait(self.ranks[self.index], wait, self._timeout)

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start a reduction in rank order."""
        return self._call(f"all_reduce {op} {describe(tensor)}", tensor, total, calls.all_reduce(op))

    def reduce(self, tensor: Tensor, op: Op, destination: int) -> Pending:
        """Start a reduction in rank order; the other ranks keep what they have."""
        written = tensor if self.index == destination else None
        kind = f"reduce {op} to {destination} {describe(tensor)}"
        return self._call(kind, tensor, written, calls.all_reduce(op))

    def reduce_scatter(self, tensor: Tensor, piece: Tensor, op: Op) -> Pending:
        """Start a reduction in rank order."""
        return self._call(f"reduce_scatter {op} {describe(tensor)}", tensor, piece, calls.reduce_scatter(op))

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start an all-gather."""
        return self._call(f"all_gather {describe(tensor)}", tensor, whole, calls.all_gather)

    def all_to_all(self, tensor: Tensor, received: Tensor) -> Pending:
        """Start an all-to-all."""
        return self._call(f"all_to_all {describe(tensor)}", tensor, received, calls.all_to_all)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start a broadcast."""
        kind = f"broadcast from {source} {describe(tensor)}"
        return self._call(kind, tensor, tensor, calls.broadcast(source))

    def gather(self, tensor: Tensor, whole: Tensor | None, destination: int) -> Pending:
        """Start a gather."""
        return self._call(f"gather to {destination} {describe(tensor)}", tensor, whole, calls.all_gather)

    def scatter(self, pieces: Tensor | None, own: Tensor, source: int) -> Pending:
        """Start a scatter."""
        return self._call(f"scatter from {source} {describe(own)}", pieces, own, calls.scatter(source))

    def barrier(self) -> Pending:
        """Start a barrier."""
        return self._call("barrier", None, None, calls.nothing)

    def send(self, tensor: Tensor, destination: int, tag: int) -> Pending:
        """Start a send, which is complete when the receive is posted."""
        message = self._board.send(self.index, destination, tag, tensor.detach())
        return LocalMessage(self, message, self.ranks[destination], None)

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a receive."""
        message = self._board.receive(source, self.index, tag, buffer)
        return LocalMessage(self, message, self.ranks[source], buffer)

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Return None: threads share all memory."""
        return None

    def shares(self, tensor: Tensor) -> bool:
        """Return False: no tensor is made by `shared_zeros`."""
        return False

    def abort(self, cause: Exception) -> None:
        """Do nothing: ranks that wait for this one learn of its end."""

    def _call(self, kind: str, read: Tensor | None, written: Tensor | None, work_out: WorkOut) -> Pending:
        call = self._board.call(self._count, kind)
        self._count += 1
        call.join(self.index, kind, None if read is None else read.detach(), work_out)
        return LocalPending(self, call, None if written is None else written.detach())


class LocalRank:
    """One thread among those that started together. See `Ranks`."""

    uses_nccl = False
    failure_log: LastWords | None = None

    def __init__(
        self, rank: int, turns: Turns, boards: dict[Key, Board], shared_results: dict[Hashable, Any]
    ) -> None:
        """`boards` and `shared_results` are one dictionary each for all ranks."""
        self.shared_results = shared_results
        self.rank, self.size = rank, turns.size
        self._turns, self._boards = turns, boards
        self._made: dict[tuple[int, ...], int] = {}

    def world(self) -> LocalTransport | None:
        """Return None: no transport is needed before groups are made."""
        return None

    def discover(self, timeout: float) -> None:
        """Do nothing: all ranks are threads of this process."""

    def connect(self, groups: Sequence[tuple[int, ...]], name: str, timeout: float) -> LocalTransport | None:
        """Return this rank's transport in the one of `groups` that it is in, or None."""
        mine = next((ranks for ranks in groups if self.rank in ranks and len(ranks) > 1), None)
        if mine is None:
            return None
        number = self._made[mine] = self._made.get(mine, 0) + 1
        board = self._boards.setdefault((mine, number), Board(mine))
        return LocalTransport(board, self._turns, mine.index(self.rank), timeout)

    def pause(self, seconds: float) -> None:
        """Sleep, and let the other ranks run."""
        self._turns.pause(self.rank, seconds)

    def close(self) -> None:
        """Do nothing: no connections are held."""


class RankThread(Thread):
    """The thread of one rank: what runs in it finds the rank by `current_local_rank`."""

    def __init__(self, rank: LocalRank, run: Callable[[], None]) -> None:
        super().__init__(target=run, name=f"plait-rank-{rank.rank}", daemon=True)
        self.rank = rank


def current_local_rank() -> LocalRank | None:
    """Return the rank that runs in the calling thread, or None outside of ranks."""
    thread = current_thread()
    return thread.rank if isinstance(thread, RankThread) else None
