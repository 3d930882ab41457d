"""The listening socket of a rank, and its message channels to other ranks of the same host.

The address of a listener is a random name in the abstract namespace of Unix sockets, which leaves no file.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

NO_SEQUENCE = -1
_PACKET = struct.Struct("=qqq")  # sequence number, value, acknowledged; then the call
MOST_CALL_BYTES = 160
"""Of the description of a call in a packet."""
_MOST_BYTES = _PACKET.size + MOST_CALL_BYTES
_DESCRIPTOR = struct.Struct("=i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_DESCRIPTOR.size) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_BACKLOG = 1024
"""Connections that may wait to be accepted, of all groups together; `connect` blocks beyond that."""


class Listener:
    """Accepts connections from processes of the same user, each identified by the address it is bound to."""

    def __init__(self) -> None:
        self.name = f"plait-{secrets.token_hex(8)}"
        self._socket = _unix_socket()
        self._socket.bind(_abstract(self.name))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._accepted: dict[bytes, socket.socket] = {}

    def connect(self, listener: str, address: str) -> socket.socket | None:
        """Return a socket bound to `address` and connected to `listener`; None if the listener is closed."""
        connection = _unix_socket()
        try:
            connection.bind(_abstract(address))
            connection.connect(_abstract(listener))
        except ConnectionRefusedError:
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def accept_pending(self) -> None:
        """Accept all pending connections, without blocking."""
        while True:
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            if _same_user(connection):
                connection.setblocking(False)
                self._accepted[address] = connection
            else:
                connection.close()

    def pop_connection(self, address: str) -> socket.socket | None:
        """Remove and return the accepted connection from `address`; None if there is none yet."""
        return self._accepted.pop(_abstract(address), None)

    def fileno(self) -> int:
        """Return the file descriptor, which is readable while connections are pending."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening, and close the accepted connections that were not popped."""
        self._socket.close()
        for connection in self._accepted.values():
            connection.close()
        self._accepted.clear()

    def __del__(self) -> None:
        if hasattr(self, "_accepted"):
            self.close()


def is_supported() -> bool:
    """Return whether this system has abstract Unix sockets and anonymous memory files."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _unix_socket() -> socket.socket:
    # SEQPACKET: messages arrive whole and in order, and the end of either process is noticed.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(name: str) -> bytes:
    return b"\0" + name.encode()


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


class ChannelMessage(NamedTuple):
    """A received number, and the file descriptor sent with it, if any, which the receiver has to close."""

    value: int
    descriptor: int | None = None
    call: bytes = b""
    """A description of the call that the message belongs to."""


class PeerChannel:
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
    def encode(sequence: int, value: int, acknowledged: int, call: bytes = b"") -> bytes:
        """Return a message as the bytes of one packet; `call` has at most `MOST_CALL_BYTES`."""
        return _PACKET.pack(sequence, value, acknowledged) + call

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
        """Receive without blocking. Until `connected` is True, call `Listener.accept_pending` first."""
        if self._incoming is None:
            self._incoming = self._listener.pop_connection(self._there)
        if self._incoming is None:
            self.gone = self._hung_up  # it never connected: the listener accepted after the hang-up
            return
        while not self.gone:
            try:
                packet, extra, _, _ = self._incoming.recvmsg(_MOST_BYTES, _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self.gone = True
                return
            sequence, value, self.acknowledged = _PACKET.unpack_from(packet)
            if sequence != NO_SEQUENCE:
                descriptor = _DESCRIPTOR.unpack(extra[0][2])[0] if extra else None
                self.received[sequence] = ChannelMessage(value, descriptor, packet[_PACKET.size :])

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
        """Close both connections, and the file descriptors of messages still in `received`."""
        for end in (self._outgoing, self._incoming):
            if end is not None:
                end.close()
        for message in self.received.values():
            if message.descriptor is not None:
                os.close(message.descriptor)
        self.received.clear()
