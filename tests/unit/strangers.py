"""Processes of another user of this host, which tests that run as root start."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest

OTHER_USER = 65534
MOST_CONNECTIONS = 5000
NEEDS_TWO_USERS = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="only root starts processes of two users"
)


def process_of_another_user(act: Callable[[], object], patience: float = 10.0) -> AbstractContextManager[int]:
    """Return `forked_process(act, patience)`, of another user."""

    def act_as_another() -> object:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * MOST_CONNECTIONS, 2 * MOST_CONNECTIONS))
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        return act()

    return forked_process(act_as_another, patience)


@contextmanager
def forked_process(act: Callable[[], object], patience: float = 10.0) -> Iterator[int]:
    """Call `act` in a forked process, and yield its id once that has returned; then kill it.

    What `act` returns is kept until then. A function that does not return is given `patience` seconds first.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        kept = None
        with suppress(BaseException):
            kept = act()
        os.write(write, b"." if kept is not None else b"!")
        time.sleep(60)
        os._exit(0)
    os.close(write)
    try:
        os.set_blocking(read, False)
        deadline = time.monotonic() + patience
        said = None
        while said is None and time.monotonic() < deadline:
            with suppress(BlockingIOError):
                said = os.read(read, 1)
            time.sleep(0.005)
        assert said != b"!", "the other process has failed"
        yield child
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def unix_socket() -> socket.socket:
    """Return a socket that does not block, of the kind that ranks have."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def abstract_names() -> set[str]:
    """Return the abstract names of all sockets of plait on this host, which every user can read."""
    with open("/proc/net/unix") as table:
        last = [line.split()[-1] for line in table]
    return {name[1:] for name in last if name.startswith("@plait-")}


def fill_backlogs(names: Sequence[str]) -> list[socket.socket]:
    """Connect to each of these listeners until it takes no more; return the connections."""
    made = []
    for name in names:
        with suppress(BlockingIOError):
            while len(made) < MOST_CONNECTIONS:
                made.append(unix_socket())
                made[-1].connect(b"\0" + name.encode())
    return made


def connect_for_ever(names: Sequence[str]) -> None:
    """Fill the backlogs of these listeners, and fill them again and again."""
    while True:
        with suppress(OSError):
            fill_backlogs(names)


def take_name(name: str) -> socket.socket:
    """Listen at an abstract name."""
    made = unix_socket()
    made.bind(b"\0" + name.encode())
    made.listen(10)
    return made
