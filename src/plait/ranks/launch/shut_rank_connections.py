"""Shuts a rank's connections to other ranks, so that its waits for them raise errors.

Nothing of torch's ends a wait of Gloo before its timeout: neither `abort` nor `destroy_process_group`.
"""

from __future__ import annotations

import os
import socket
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from plait.ranks.launcher_processes import parent_of
from plait.ranks.run_store import plain_address
from plait.ranks.transport.shared_memory.peer_sockets import LISTENER_PREFIX

_PROCESSES = Path("/proc")
_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_LISTENS = 0
"""The port of the other end of a socket that listens."""


def shared_socket(descriptor: int) -> socket.socket:
    """Return a socket object of a duplicate of `descriptor`, whose blocking mode stays as it is.

    With `socket.setdefaulttimeout` a new object makes it non-blocking, also for its other users.
    """
    is_blocking = os.get_blocking(descriptor)
    own = socket.socket(fileno=os.dup(descriptor))
    os.set_blocking(descriptor, is_blocking)
    return own


class RankConnections:
    """Finds and shuts the connections of this process to other ranks, over TCP or Unix sockets.

    Of those to other hosts, all to a host of the world: which program has the other end cannot be seen here.
    Connections to other programs on this host, and pipes, are left as they are.
    """

    def __init__(self, store_port: int | None, other_hosts: frozenset[str] = frozenset()) -> None:
        """`store_port`: the port of the store, whose connections are kept; None: there is no store.

        `other_hosts`: the addresses of the other hosts of the world.
        """
        self._store_port, self._other_hosts = store_port, other_hosts
        self._leads_to_rank: dict[int, bool] = {}
        """Of each connection that was seen, by its inode, whether its other end is a rank."""

    def shut(self, *, with_store: bool = False) -> None:
        """Shut the connections to other ranks, so that both ends' waits fail; the store's if `with_store`.

        `with_store`: also those to the store.
        """
        table = _SocketsOfRanks()
        for entry in os.listdir(_PROCESSES / "self" / "fd"):
            with suppress(OSError):  # closed meanwhile, not connected yet, or not any more
                status = os.fstat(int(entry))
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                with shared_socket(int(entry)) as connection:
                    if self._is_shut(connection, status.st_ino, table, with_store):
                        connection.shutdown(socket.SHUT_RDWR)

    def _is_shut(
        self, connection: socket.socket, inode: int, table: _SocketsOfRanks, with_store: bool
    ) -> bool:
        """Return whether `shut` shuts a socket: one to another rank here or, `with_store`, to the store."""
        own, peer = connection.getsockname(), connection.getpeername()
        if connection.family == socket.AF_UNIX:
            return any(isinstance(name, bytes) and name.startswith(LISTENER_PREFIX) for name in (own, peer))
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        leads_to_host = plain_address(peer[0]) in self._other_hosts
        if own[0] != peer[0] and not leads_to_host:
            return False
        if self._store_port in (own[1], peer[1]):
            return with_store
        if leads_to_host:
            return True
        if inode not in self._leads_to_rank:
            self._leads_to_rank[inode] = table.have_end(peer[1], own[1])
        return self._leads_to_rank[inode]


class _SocketsOfRanks:
    """The sockets of this host's ranks, read when they are asked for."""

    def have_end(self, port: int, of_other_end: int) -> bool:
        """Return whether a rank's process has the other end of a connection at `port`, or listens there."""
        # Before the listener accepts a connection, no process has its end.
        ends = self._by_ports[port, of_other_end] | self._by_ports[port, _LISTENS]
        return not ends.isdisjoint(self._inodes)

    @cached_property
    def _by_ports(self) -> dict[tuple[int, int], set[str]]:
        """The inodes of all TCP sockets on this host, by own port and that of the other end."""
        found = defaultdict(set)
        for table in _TABLES:
            with suppress(OSError):  # a host without IPv6
                for line in table.read_text().splitlines()[1:]:
                    fields = line.split()
                    own, other = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                    found[own, other].add(fields[9])
        return found

    @cached_property
    def _inodes(self) -> set[str]:
        """The inodes of all sockets that ranks have, or processes that ranks have forked."""
        found = set()
        for process in _processes_of_ranks():
            with suppress(OSError):  # it has ended
                for entry in (process / "fd").iterdir():
                    with suppress(OSError):
                        kind, _, inode = os.readlink(entry).partition(":")
                        if kind == "socket":
                            found.add(inode.strip("[]"))
        return found


def _processes_of_ranks() -> Iterator[Path]:
    """Yield the folders in /proc of all processes that may hold a connection of this host's ranks.

    A data loader's worker has the connections of the rank that forked it, also when that rank is lost, and
    the command line of the fork server.
    """
    parent, command = os.getppid(), (_PROCESSES / "self" / "cmdline").read_bytes()
    for process in _PROCESSES.iterdir():
        with suppress(OSError):  # it has ended, or is another user's
            if process.name.isdecimal() and (
                (process / "cmdline").read_bytes() == command or parent_of(int(process.name)) == parent
            ):
                yield process
