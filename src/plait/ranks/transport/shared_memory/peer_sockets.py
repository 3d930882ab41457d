"""The listening socket of a rank, and its message channels to other ranks of the same host.

The address of a listener is a random name in the abstract namespace of Unix sockets, which leaves no file.
Every user of the host can read that name in `/proc/net/unix` and connect: so each end of a connection asks
the kernel whose process the other one is, and closes it if it is another user's. The first message of a
connection says which peer it comes from; connecting sockets have no name, which others could take first.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
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
"""Connections that may wait to be accepted, of all groups together."""
_MOST_ADDRESS_BYTES = 512
LISTENER_PREFIX = b"\0plait-"
"""How the address of each listener begins."""


class Listener:
    """Accepts connections from processes of the same user, each identified by the address it sends first."""

    def __init__(self) -> None:
        self.name = f"plait-{secrets.token_hex(16)}"
        self._socket = _unix_socket()
        self._socket.bind(_abstract(self.name))
        self._socket.listen(_BACKLOG)
        self._unidentified: list[socket.socket] = []
        """Accepted connections whose first message has not arrived."""
        self._accepted: dict[str, socket.socket] = {}

    def accept_pending(self) -> None:
        """Accept the pending connections, without blocking, and close those of other users."""
        for _ in range(_BACKLOG):  # a process that connects again and again does not keep this one
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                break
            if _is_of_this_user(connection):
                connection.setblocking(False)
                self._unidentified.append(connection)
            else:
                connection.close()
        self._unidentified = [one for one in self._unidentified if not self._identified(one)]

    def pop_connection(self, address: str) -> socket.socket | None:
        """Remove and return the accepted connection from `address`; None if there is none yet."""
        return self._accepted.pop(address, None)

    def register(self, poll: select.poll) -> None:
        """Register with `poll` for connections to accept, and for the first messages of accepted ones."""
        for one in (self._socket, *self._unidentified):
            poll.register(one, select.POLLIN)

    def close(self) -> None:
        """Stop listening, and close the accepted connections that were not popped."""
        for one in (self._socket, *self._unidentified, *self._accepted.values()):
            one.close()
        self._unidentified.clear()
        self._accepted.clear()

    def __del__(self) -> None:
        if hasattr(self, "_accepted"):
            self.close()

    def _identified(self, connection: socket.socket) -> bool:
        """Read the first message, if it has arrived; return False while it has not."""
        try:
            address = connection.recv(_MOST_ADDRESS_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            address = b""
        if address:
            self._accepted[address.decode(errors="replace")] = connection
        else:
            connection.close()
        return True


def connect(listener: str, address: str) -> socket.socket | None:
    """Return a socket that is connected to `listener` and has sent it `address`. Does not block.

    None if the listener is closed, or its name taken by a process of another user. Raises `BlockingIOError`
    while as many connections wait there as the listener takes.
    """
    connection = _unix_socket()
    try:
        connection.connect(_abstract(listener))
        if not _is_of_this_user(connection):
            raise ConnectionRefusedError
        connection.send(address.encode())
    except ConnectionError:
        connection.close()
        return None
    except BlockingIOError:
        connection.close()
        raise
    return connection


def is_supported() -> bool:
    """Return whether this system has abstract Unix sockets and anonymous memory files."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _unix_socket() -> socket.socket:
    # SEQPACKET: messages arrive whole and in order, and the end of either process is noticed.
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _abstract(name: str) -> bytes:
    return b"\0" + name.encode()


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end, which connected or listens, is one of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.geteuid()


class ChannelMessage(NamedTuple):
    """A received number, and the file descriptor sent with it, if any, which the receiver has to close."""

    value: int
    descriptor: int | None = None
    call: bytes = b""
    """A description of the call that the message belongs to."""


class PeerChannel:
    """A two-way message channel to one peer process: one socket connection per direction."""

    def __init__(self, listener: Listener, peer: str, here: str, there: str) -> None:
        """Connect to the listener `peer` as `here`; the peer's connection comes from `there`."""
        self.received: dict[int, ChannelMessage] = {}
        """Messages by sequence number, until they are taken out."""
        self.acknowledged = 0
        """Last sequence number that the peer has acknowledged (exclusive)."""
        self.gone = False
        """Whether the peer has closed its end and everything it sent is received."""
        self._listener, self._peer, self._here, self._there = listener, peer, here, there
        self._incoming: socket.socket | None = None
        self._outgoing: socket.socket | None = None
        self._hung_up = False
        self.connect()

    @staticmethod
    def encode(sequence: int, value: int, acknowledged: int, call: bytes = b"") -> bytes:
        """Return a message as the bytes of one packet; `call` has at most `MOST_CALL_BYTES`."""
        return _PACKET.pack(sequence, value, acknowledged) + call

    def send(self, packet: bytes, descriptor: int | None) -> bool:
        """Send a packet; return False when the send buffer is full, or the peer cannot be connected to yet.

        Succeeds even if the peer has closed.
        """
        if not self.connect():
            return False
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
            pass  # the peer has closed, which receiving finds out
        return True

    def connect(self) -> bool:
        """Connect to the peer unless connected; return False while the peer's listening backlog is full."""
        if not self.connected:
            with suppress(BlockingIOError):
                self._outgoing = connect(self._peer, self._here)
                self._hung_up = self._outgoing is None
        return self.connected

    @property
    def connected(self) -> bool:
        """Whether this rank has connected to the peer process, or that is known to have closed."""
        return self._outgoing is not None or self._hung_up

    @property
    def established(self) -> bool:
        """Whether there is a connection in each direction."""
        return self._incoming is not None and self._outgoing is not None

    def receive_pending(self) -> None:
        """Read the messages that have arrived from the peer into `received`, without blocking.

        Until `established` is True, call `connect` and `Listener.accept_pending` first.
        """
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
            self._listener.register(poll)
        if self._outgoing is not None and (writable or self._incoming is None):
            poll.register(self._outgoing, select.POLLOUT if writable else 0)  # 0: a hang-up only

    def note_hang_up(self, ready: Sequence[tuple[int, int]]) -> None:
        """Record that the peer closed the connection, if `poll`'s `ready` events say so."""
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
