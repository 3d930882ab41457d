"""Collectives and messages among threads: the last rank to take part works out what each one gets.

Each rank itself writes what it gets to its own tensor, when it waits: what watches a thread's operations (a
dispatch mode) then sees all that is written for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm.buffers import dense, describe
from plait.comm.transport.reduction import Op, fold

Handed = Mapping[int, Tensor | None]
"""What each rank hands in, in order of the index."""
WorkOut = Callable[[Handed], Mapping[int, Tensor]]
"""Given what all ranks hand in, returns what each one gets: flat, in memory that no rank writes to."""


@dataclass
class Call:
    """One collective of a group, from the first rank that comes to the last."""

    kind: str
    """With all that must be alike on the ranks, such as the operation and the shape."""
    size: int
    handed: dict[int, Tensor | None] = field(default_factory=dict)
    results: Mapping[int, Tensor] | None = None
    error: str | None = None

    def join(self, index: int, kind: str, tensor: Tensor | None, work_out: WorkOut) -> None:
        """Take part; the last one to do so works out the results. Another call than the others' fails all."""
        if kind != self.kind:
            self.error = f"the ranks make different calls: index {index} {kind}, others {self.kind}"
        self.handed[index] = tensor
        if len(self.handed) == self.size and self.error is None:
            with torch.no_grad():
                self.results = work_out(dict(sorted(self.handed.items())))
            self.handed.clear()

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.results is not None or self.error is not None

    def result(self, index: int) -> Tensor | None:
        """What a rank gets, flat, if it gets anything."""
        assert self.results is not None
        return self.results.get(index)

    def withdraw(self, index: int) -> None:
        """A rank may write to what it handed in, although the others do not have it yet."""
        tensor = self.handed.get(index)
        if tensor is not None:
            self.handed[index] = tensor.clone()


@dataclass
class Transfer:
    """One message between two ranks; what is sent is copied when both are there."""

    sent: Tensor | None = None
    buffer: Tensor | None = None
    received: Tensor | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.received is not None or self.error is not None

    def meet(self) -> None:
        """Copy what was sent, once both are there: the sender may write to it then."""
        if self.sent is None or self.buffer is None:
            return
        if self.sent.numel() != self.buffer.numel() or self.sent.dtype != self.buffer.dtype:
            self.error = f"{describe(self.sent)} was sent into a buffer of {describe(self.buffer)}"
        else:
            self.received = self.sent.reshape(-1).clone()
        self.sent = self.buffer = None


class Board:
    """What the ranks of one group have under way."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._calls: dict[int, Call] = {}
        self._unsent: dict[tuple[int, int, int], deque[Transfer]] = {}
        self._unreceived: dict[tuple[int, int, int], deque[Transfer]] = {}

    def call(self, number: int, kind: str) -> Call:
        """The collective with this number, which counts alike on every rank."""
        call = self._calls.setdefault(number, Call(kind, len(self.ranks)))
        if len(call.handed) == len(self.ranks) - 1:
            del self._calls[number]  # this rank is the last to ask for it
        return call

    def send(self, source: int, destination: int, tag: int, tensor: Tensor) -> Transfer:
        """A message, matched with the oldest receive of its pair and tag that has none."""
        message = self._match((source, destination, tag), self._unsent, self._unreceived)
        message.sent = tensor
        message.meet()
        return message

    def receive(self, source: int, destination: int, tag: int, buffer: Tensor) -> Transfer:
        """Likewise, with the oldest message that was sent."""
        message = self._match((source, destination, tag), self._unreceived, self._unsent)
        message.buffer = buffer
        message.meet()
        return message

    @staticmethod
    def _match(
        key: tuple[int, int, int],
        waiting: dict[tuple[int, int, int], deque[Transfer]],
        other: dict[tuple[int, int, int], deque[Transfer]],
    ) -> Transfer:
        """The oldest message in `waiting`; else a new one, put in `other` for the other side to find."""
        if waiting.get(key):
            return waiting[key].popleft()
        message = Transfer()
        other.setdefault(key, deque()).append(message)
        return message


def all_reduce(op: Op) -> WorkOut:
    """Every rank gets the reduction of all tensors."""

    def work_out(handed: Handed) -> Mapping[int, Tensor]:
        return dict.fromkeys(handed, _folded([_flat(tensor) for tensor in handed.values()], op))

    return work_out


def reduce_scatter(op: Op) -> WorkOut:
    """Every rank gets its piece of the reduction."""

    def work_out(handed: Handed) -> Mapping[int, Tensor]:
        pieces = [_flat(tensor).tensor_split(len(handed)) for tensor in handed.values()]
        return {index: _folded([piece[index] for piece in pieces], op) for index in handed}

    return work_out


def all_gather(handed: Handed) -> Mapping[int, Tensor]:
    """Every rank gets all tensors, in order."""
    return dict.fromkeys(handed, torch.cat([_flat(tensor) for tensor in handed.values()]))


def all_to_all(handed: Handed) -> Mapping[int, Tensor]:
    """Every rank gets the pieces that are for it."""
    pieces = [_flat(tensor).tensor_split(len(handed)) for tensor in handed.values()]
    return {index: torch.cat([piece[index] for piece in pieces]) for index in handed}


def broadcast(source: int) -> WorkOut:
    """Every rank but the source gets the tensor of the source."""

    def work_out(handed: Handed) -> Mapping[int, Tensor]:
        sent = _flat(handed[source]).clone()
        return {index: sent for index in handed if index != source}

    return work_out


def scatter(source: int) -> WorkOut:
    """Every rank gets its piece of what the source hands in."""

    def work_out(handed: Handed) -> Mapping[int, Tensor]:
        pieces = _flat(handed[source]).clone().tensor_split(len(handed))
        return dict(enumerate(pieces))

    return work_out


def nothing(handed: Handed) -> Mapping[int, Tensor]:
    """All ranks have come, which is all."""
    return {}


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return dense(tensor).view(-1)


def _folded(pieces: Sequence[Tensor], op: Op) -> Tensor:
    total = torch.empty_like(pieces[0])
    fold(pieces, op, total)
    return total
