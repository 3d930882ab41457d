"""The door of a rank: where the other ranks of its host call it, and what they must know for that.

Its address is a name that nobody can guess, in the abstract namespace of Unix sockets: it leaves no file.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys

_BACKLOG = 1024
"""Calls that may stand before the door, of all groups: only a caller beyond that waits."""


class Door:
    """Takes calls from processes of the same user, each known by the address from which it calls."""

    def __init__(self) -> None:
        self.name = f"plait-{secrets.token_hex(8)}"
        self._listener = _unix_socket()
        self._listener.bind(_abstract(self.name))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._inside: dict[bytes, socket.socket] = {}

    def call(self, door: str, address: str) -> socket.socket | None:
        """A connection to another rank's door, made from `address` without its help; None if it is gone."""
        connection = _unix_socket()
        try:
            connection.bind(_abstract(address))
            connection.connect(_abstract(door))
        except ConnectionRefusedError:
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def open(self) -> None:
        """Let in all that stand before it. Does not wait."""
        while True:
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            if _same_user(connection):
                connection.setblocking(False)
                self._inside[address] = connection
            else:
                connection.close()

    def take(self, address: str) -> socket.socket | None:
        """The connection of whoever called from `address`, if it has been let in."""
        return self._inside.pop(_abstract(address), None)

    def fileno(self) -> int:
        """Readable while somebody stands before the door."""
        return self._listener.fileno()

    def close(self) -> None:
        """Turn away who is not taken yet, and whoever comes."""
        self._listener.close()
        for connection in self._inside.values():
            connection.close()
        self._inside.clear()

    def __del__(self) -> None:
        if hasattr(self, "_inside"):
            self.close()


def possible() -> bool:
    """Whether this system has what a door and shared memory need."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _unix_socket() -> socket.socket:
    """Messages arrive whole and in order, and the end of either process is noticed."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(name: str) -> bytes:
    return b"\0" + name.encode()


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()
