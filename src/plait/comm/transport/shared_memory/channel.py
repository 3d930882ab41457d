"""A message channel to one other rank of the same host."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from plait.comm.transport.shared_memory.listener import Listener

NO_SEQUENCE = -1
_PACKET = struct.Struct("=qqq")  # sequence number, value, acknowledged
_DESCRIPTOR = struct.Struct("=i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_DESCRIPTOR.size) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ChannelMessage(NamedTuple):
    """A received number, and the file descriptor sent with it, if any, which the receiver has to close."""

    value: int
    descriptor: int | None = None


class Channel:
    """A two-way message channel to one peer process: one socket connection per direction."""

    def __init__(self, listener: Listener, peer: str, here: str, there: str) -> None:
        """Connect from address `here` to the listener `peer`; the peer's connection comes from `there`."""
        self.received: dict[int, ChannelMessage] = {}
        """Messages by sequence number, until they are taken out."""
        self.acknowledged = 0
        """Last sequence number that the peer has acknowledged (exclusive)."""
        self.gone = False
        """Whether the peer has closed its end and everything it sent is received."""
        self._listener, self._there = listener, there
        self._incoming: socket.socket | None = None
        self._outgoing = listener.connect(peer, here)
        self._hung_up = self._outgoing is None

    @staticmethod
    def encode(sequence: int, value: int, acknowledged: int) -> bytes:
        """Return a message as the bytes of one packet."""
        return _PACKET.pack(sequence, value, acknowledged)

    def send(self, packet: bytes, descriptor: int | None) -> bool:
        """Send a packet; return False when the send buffer is full. Succeeds even if the peer has closed."""
        if self._outgoing is None:
            return True
        try:
            if descriptor is None:
                self._outgoing.send(packet)
            else:
                socket.send_fds(self._outgoing, [packet], [descriptor])
        except BlockingIOError:
            return False
        except ConnectionError:
            self._hung_up = True
        return True

    @property
    def connected(self) -> bool:
        """Whether the peer's connection is accepted."""
        return self._incoming is not None

    def receive_pending(self) -> None:
        """Receive all pending messages without blocking. Before `connected`, call `accept_pending` first."""
        if self._incoming is None:
            self._incoming = self._listener.pop_connection(self._there)
        if self._incoming is None:
            self.gone = self._hung_up  # it never connected: the listener accepted after the hang-up
            return
        while not self.gone:
            try:
                packet, extra, _, _ = self._incoming.recvmsg(_PACKET.size, _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self.gone = True
                return
            sequence, value, self.acknowledged = _PACKET.unpack(packet)
            if sequence != NO_SEQUENCE:
                descriptor = _DESCRIPTOR.unpack(extra[0][2])[0] if extra else None
                self.received[sequence] = ChannelMessage(value, descriptor)

    def register(self, poll: select.poll, writable: bool) -> None:
        """Register with `poll` for incoming messages and, if `writable`, for free send-buffer space."""
        if self._incoming is not None:
            poll.register(self._incoming, select.POLLIN)
        else:
            poll.register(self._listener, select.POLLIN)
        if self._outgoing is not None and (writable or self._incoming is None):
            poll.register(self._outgoing, select.POLLOUT if writable else 0)  # 0: a hang-up only

    def note_hang_up(self, ready: Sequence[tuple[int, int]]) -> None:
        """Record a hang-up of the outgoing connection if it is among the `ready` events of `poll`."""
        if self._outgoing is not None:
            number = self._outgoing.fileno()
            gone = select.POLLHUP | select.POLLERR
            self._hung_up |= any(other == number and event & gone for other, event in ready)

    def close(self) -> None:
        """Close both connections, and the file descriptors of messages that were not taken out."""
        for end in (self._outgoing, self._incoming):
            if end is not None:
                end.close()
        for message in self.received.values():
            if message.descriptor is not None:
                os.close(message.descriptor)
        self.received.clear()
