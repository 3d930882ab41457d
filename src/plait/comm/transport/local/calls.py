"""Collectives and messages among threads: the last rank to take part carries out what all have asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm.buffers import dense, describe
from plait.comm.transport.reduction import Op, fold


@dataclass
class Part:
    """What one rank hands in for a collective: a tensor that is read, one that is written, or both."""

    read: Tensor | None
    written: Tensor | None


Parts = Mapping[int, Part]
"""By the index of the rank; complete, one for each."""
CarryOut = Callable[[Parts], None]


@dataclass
class Call:
    """One collective of a group, from the first rank that comes to the last."""

    kind: str
    """With all that must be alike on the ranks, such as the operation and the shape."""
    size: int
    parts: dict[int, Part] = field(default_factory=dict)
    complete: bool = False
    error: str | None = None

    def join(self, index: int, kind: str, part: Part, carry_out: CarryOut) -> None:
        """Take part; the last one to do so carries it out. A rank that calls something else fails all."""
        if kind != self.kind:
            self.error = f"the ranks make different calls: index {index} {kind}, others {self.kind}"
        self.parts[index] = part
        if len(self.parts) == self.size and self.error is None:
            with torch.no_grad():
                carry_out(dict(sorted(self.parts.items())))
            self.complete = True
            self.parts.clear()

    def withdraw(self, index: int) -> None:
        """A rank needs no result any more, and may write to what it handed in."""
        part = self.parts.get(index)
        if part is not None:
            part.written = None
            part.read = None if part.read is None else part.read.clone()


@dataclass
class Message:
    """One message between two ranks: sent, received, or both and so complete."""

    sent: Tensor | None = None
    buffer: Tensor | None = None
    complete: bool = False
    error: str | None = None

    def deliver(self) -> None:
        """Copy what was sent into the buffer, once both are there."""
        if self.sent is None or self.buffer is None:
            return
        if self.sent.nbytes != self.buffer.nbytes or self.sent.dtype != self.buffer.dtype:
            self.error = f"{describe(self.sent)} was sent into a buffer of {describe(self.buffer)}"
        else:
            self.buffer.view(-1).copy_(self.sent.reshape(-1))
        self.sent = self.buffer = None
        self.complete = True


class Board:
    """What the ranks of one group have under way."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._calls: dict[int, Call] = {}
        self._unsent: dict[tuple[int, int, int], deque[Message]] = {}
        self._unreceived: dict[tuple[int, int, int], deque[Message]] = {}

    def call(self, number: int, kind: str) -> Call:
        """The collective with this number, which counts alike on every rank."""
        call = self._calls.setdefault(number, Call(kind, len(self.ranks)))
        if len(call.parts) == len(self.ranks) - 1:
            del self._calls[number]  # this rank is the last to ask for it
        return call

    def send(self, source: int, destination: int, tag: int, tensor: Tensor) -> Message:
        """A message, matched with the oldest receive of its pair and tag that has none."""
        message = self._match((source, destination, tag), self._unsent, self._unreceived)
        message.sent = tensor
        message.deliver()
        return message

    def receive(self, source: int, destination: int, tag: int, buffer: Tensor) -> Message:
        """Likewise, with the oldest message that was sent."""
        message = self._match((source, destination, tag), self._unreceived, self._unsent)
        message.buffer = buffer
        message.deliver()
        return message

    @staticmethod
    def _match(
        key: tuple[int, int, int],
        waiting: dict[tuple[int, int, int], deque[Message]],
        other: dict[tuple[int, int, int], deque[Message]],
    ) -> Message:
        """The oldest message in `waiting`; else a new one, put in `other` for the other side to find."""
        if waiting.get(key):
            return waiting[key].popleft()
        message = Message()
        other.setdefault(key, deque()).append(message)
        return message


def all_reduce(op: Op) -> CarryOut:
    """Into every rank's written tensor the reduction of all that were read."""

    def carry_out(parts: Parts) -> None:
        total = _folded([_flat(part) for part in parts.values()], op)
        for part in parts.values():
            _write(part, total)

    return carry_out


def reduce_scatter(op: Op) -> CarryOut:
    """Into every rank's written tensor its piece of the reduction."""

    def carry_out(parts: Parts) -> None:
        pieces = [_flat(part).tensor_split(len(parts)) for part in parts.values()]
        for index, part in parts.items():
            _write(part, _folded([piece[index] for piece in pieces], op))

    return carry_out


def all_gather(parts: Parts) -> None:
    """Into every rank's written tensor all that were read, in order."""
    read = [_flat(part) for part in parts.values()]
    for part in parts.values():
        if part.written is not None:
            for piece, given in zip(part.written.view(-1).tensor_split(len(parts)), read, strict=True):
                if piece.data_ptr() != given.data_ptr():
                    piece.copy_(given)


def all_to_all(parts: Parts) -> None:
    """Into every rank's written tensor the pieces that are for it."""
    pieces = [_flat(part).tensor_split(len(parts)) for part in parts.values()]
    for index, part in parts.items():
        _write(part, torch.cat([piece[index] for piece in pieces]))


def broadcast(source: int) -> CarryOut:
    """Into every rank's written tensor that of the source."""

    def carry_out(parts: Parts) -> None:
        sent = parts[source].read
        for index, part in parts.items():
            if index != source and sent is not None:
                _write(part, sent.reshape(-1))

    return carry_out


def scatter(source: int) -> CarryOut:
    """Into every rank's written tensor its piece of what the source gives."""

    def carry_out(parts: Parts) -> None:
        pieces = _flat(parts[source]).tensor_split(len(parts))
        for index, part in parts.items():
            _write(part, pieces[index])

    return carry_out


def nothing(parts: Parts) -> None:
    """All ranks have come, which is all."""


def _flat(part: Part) -> Tensor:
    assert part.read is not None
    return dense(part.read).view(-1)


def _folded(pieces: Sequence[Tensor], op: Op) -> Tensor:
    total = torch.empty_like(pieces[0])
    fold(pieces, op, total)
    return total


def _write(part: Part, flat: Tensor) -> None:
    if part.written is not None:
        part.written.view(-1).copy_(flat)
