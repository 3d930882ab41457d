"""The key-value store of a run: rank 0 listens at a port, or torchrun's agent does; the others connect to it.

torch prints C++ frames, or waits for ever, where a name is unknown, a port is taken, or what answers there
is no store. So all of that is found out first, with plain sockets.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from plait.errors import CommunicationError

T = TypeVar("T")

_PROBE_SECONDS = 2.0
"""For a port to answer: a connection, and then torch's own."""
_MOST_SECONDS_FOR_NAME = 15.0
"""Until a host name is known: that of a container that starts later."""
_BACKLOG = 2048
_LISTENS = "0A"
"""A state in `/proc/net/tcp`."""


def require_known(host: str, deadline: float) -> None:
    """Block until `host` resolves to an address. Raises `CommunicationError` after some seconds without.

    Until then it is looked up again and again, after a line on stderr; not beyond `deadline`.
    """
    last = min(deadline, time.monotonic() + _MOST_SECONDS_FOR_NAME)
    told = False
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        here, left = socket.gethostname(), last - time.monotonic()
        if left <= 0:
            raise CommunicationError(
                f"the host of rank 0, {host}, has no address on {here} ({reason}): add it to the name server "
                "or the hosts file, or set MASTER_ADDR to an address of that host."
            )
        if not told:
            told = True
            line = f"plait: {host}, the host of rank 0, has no address on {here}: looked up for {left:.0f} s."
            print(line, file=sys.stderr, flush=True)
        time.sleep(min(left, 0.5))


def listen(host: str, port: int) -> Store | None:
    """Start a store server in this process at `port`, and return the store; None if the port is taken.

    It accepts connections from this host only, where `host` is a loopback address, else from everywhere.
    """
    listener = listening_socket(host, port)
    return None if listener is None else server_at(host, port, listener.detach())


def listening_socket(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at `port` (0: any free one); None if the port is taken.

    It accepts connections from this host only, where `host` is a loopback address, else from everywhere.
    """
    try:
        return _listener(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise CommunicationError(
            f"rank 0 cannot listen at port {port} ({error.strerror}): set MASTER_PORT to another one."
        ) from None


def server_at(host: str, port: int, listener: int | None = None) -> Store:
    """Return this process's `TCPStore` server at `port`; a new one takes the socket descriptor `listener`."""
    own, limit = host if is_loopback(host) else "127.0.0.1", timedelta(seconds=30)
    store: Store = TCPStore(
        own, port, None, True, limit, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener
    )
    return store


def connect(host: str, port: int) -> Store | str:
    """Return a client of the store at `port` of `host`, or a text that says why there is none."""
    where = f"port {port} of {host}"
    if is_loopback(host) and (users := users_listening_at(port)) and not users & {os.geteuid(), 0}:
        return f"{where} belongs to user {users.pop()}"
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
    except OSError as error:
        return f"nothing answers at {where} ({error.strerror or error})"
    limit = timedelta(seconds=_PROBE_SECONDS)
    made: Store | None = within(
        _PROBE_SECONDS, lambda: TCPStore(host, port, None, False, limit, wait_for_workers=False)
    )
    return made or f"what answers at {where} is no store of torch"


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, called in a thread; None if it fails or takes more than `seconds`."""
    results: list[T] = []

    def call() -> None:
        with suppress(RuntimeError, ValueError, OSError):  # nothing answers, or what is no store
            results.append(function())

    thread = threading.Thread(target=call, name="plait-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def is_gone(store: Store) -> bool:
    """Return whether a TCP store's server is gone, checked by a socket: torch would print a C++ stack."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return False
    try:
        socket.create_connection((store.host, store.port), _PROBE_SECONDS).close()
    except OSError:
        return True
    return False


def users_listening_at(port: int) -> set[int]:
    """Return the ids of users whose processes listen at a TCP port of this host, from `/proc/net`."""
    rows: list[list[str]] = []
    for table in ("tcp", "tcp6"):
        try:
            rows += [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        except OSError:
            continue
    return {int(row[7]) for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}")}


def _listener(host: str, port: int) -> socket.socket:
    if is_loopback(host):
        address = "127.0.0.1" if host == "localhost" else host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def plain_address(address: str) -> str:
    """Return an address as other hosts know it: without the prefix of IPv4 in IPv6, and without a zone."""
    return address.removeprefix("::ffff:").partition("%")[0]


def is_loopback(host: str) -> bool:
    """Return whether a name or address stands for this host alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
