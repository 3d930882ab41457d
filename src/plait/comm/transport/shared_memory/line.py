"""A line to one other rank of the same host: words go out on one connection and come in on another."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from plait.comm.transport.shared_memory.door import Door

NO_TICKET = -1
_WORD = struct.Struct("=qqq")  # ticket, value, finished
_DESCRIPTOR = struct.Struct("=i")
_ROOM_FOR_ONE = socket.CMSG_SPACE(_DESCRIPTOR.size) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Word(NamedTuple):
    """What a rank said: a number, and a file descriptor that belongs to whoever heard it."""

    value: int
    descriptor: int | None = None


class Line:
    """Each rank makes the connection it speaks on, so either may speak before the other knows of the line."""

    def __init__(self, door: Door, peer: str, here: str, there: str) -> None:
        """Call the peer's door `peer` from the address `here`; the peer calls `door` from `there`."""
        self.heard: dict[int, Word] = {}
        self.finished = 0
        """Below which ticket the peer had finished when it last spoke."""
        self.gone = False
        """Whether the peer has hung up, and all that it said before is heard."""
        self._door, self._there = door, there
        self._incoming: socket.socket | None = None
        self._outgoing = door.call(peer, here)
        self._hung_up = self._outgoing is None

    @staticmethod
    def encode(ticket: int, value: int, finished: int) -> bytes:
        """A word as it travels."""
        return _WORD.pack(ticket, value, finished)

    def say(self, word: bytes, descriptor: int | None) -> bool:
        """Whether the word is on its way: not while too many others are. A peer that is gone is no error."""
        if self._outgoing is None:
            return True
        try:
            if descriptor is None:
                self._outgoing.send(word)
            else:
                socket.send_fds(self._outgoing, [word], [descriptor])
        except BlockingIOError:
            return False
        except ConnectionError:
            self._hung_up = True
        return True

    @property
    def connected(self) -> bool:
        """Whether the peer has called."""
        return self._incoming is not None

    def listen(self) -> None:
        """Take in all that was said so far. Open the door before, while not `connected`."""
        if self._incoming is None:
            self._incoming = self._door.take(self._there)
        if self._incoming is None:
            self.gone = self._hung_up  # it never called: the door was opened after the hang-up
            return
        while not self.gone:
            try:
                word, extra, _, _ = self._incoming.recvmsg(_WORD.size, _ROOM_FOR_ONE, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                word = b""
            if not word:
                self.gone = True
                return
            ticket, value, self.finished = _WORD.unpack(word)
            if ticket != NO_TICKET:
                descriptor = _DESCRIPTOR.unpack(extra[0][2])[0] if extra else None
                self.heard[ticket] = Word(value, descriptor)

    def watch(self, poll: select.poll, room: bool) -> None:
        """Have `poll` return when there is something to hear, or `room` to speak."""
        if self._incoming is not None:
            poll.register(self._incoming, select.POLLIN)
        else:
            poll.register(self._door, select.POLLIN)
        if self._outgoing is not None and (room or self._incoming is None):
            poll.register(self._outgoing, select.POLLOUT if room else 0)  # 0: a hang-up only

    def notice(self, ready: Sequence[tuple[int, int]]) -> None:
        """Take note of a hang-up, in what `poll` returned, on the connection that this rank speaks on."""
        if self._outgoing is not None:
            number = self._outgoing.fileno()
            gone = select.POLLHUP | select.POLLERR
            self._hung_up |= any(other == number and event & gone for other, event in ready)

    def close(self) -> None:
        """Hang up."""
        for end in (self._outgoing, self._incoming):
            if end is not None:
                end.close()
        for word in self.heard.values():
            if word.descriptor is not None:
                os.close(word.descriptor)
        self.heard.clear()
