"""Shuts a rank's connections to other ranks, so that its waits for them raise errors.

Nothing of torch's ends a wait of Gloo before its timeout: neither `abort` nor `destroy_process_group`.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from plait.ranks.transport.shared_memory.channel import LISTENER_PREFIX

_DESCRIPTORS = Path("/proc/self/fd")


def shut_connections(spared_port: int | None) -> None:
    """Shut all connections of this process over TCP within the host, and the channels of shared memory.

    The other end sees that they are closed, too. Those to other hosts, and pipes, are left as they are, and
    those to `spared_port`: the store's.
    """
    for entry in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile, not connected yet, or not any more
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if _leads_to_rank(connection, spared_port):
                    connection.shutdown(socket.SHUT_RDWR)


def _leads_to_rank(connection: socket.socket, spared_port: int | None) -> bool:
    """Return whether a socket is connected within this host by TCP, or to a listener of shared memory."""
    own, peer = connection.getsockname(), connection.getpeername()
    if connection.family == socket.AF_UNIX:
        return any(isinstance(name, bytes) and name.startswith(LISTENER_PREFIX) for name in (own, peer))
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and own[0] == peer[0] and spared_port not in (own[1], peer[1])
