"""The listening socket of a rank, to which the other ranks of its host connect.

Its address is a random name in the abstract namespace of Unix sockets, which leaves no file.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys

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
        """Return a connection from `address` to a listener's socket, without waiting; None if closed."""
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
        """Return the accepted connection from `address`, or None if there is none yet."""
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
