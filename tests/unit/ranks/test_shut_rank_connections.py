"""A rank's waits for others end when its connections are shut; no other connection is touched."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.ranks.launch.shut_rank_connections import RankConnections, shared_socket
from plait.ranks.transport.shared_memory.peer_sockets import LISTENER_PREFIX


def connected(family: socket.AddressFamily, address: Any) -> tuple[socket.socket, ...]:
    """A listener, and both ends of a connection to it."""
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    client = socket.create_connection(listener.getsockname()) if family != socket.AF_UNIX else None
    if client is None:
        client = socket.socket(family)
        client.connect(address)
    return listener, client, listener.accept()[0]


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True


def shut(spared: bool) -> dict[str, bool]:
    """Which connections of a rank are open after its connections to other ranks were shut."""
    name = secrets.token_hex(8).encode()
    ours = {
        "tcp": connected(socket.AF_INET, ("127.0.0.1", 0)),
        "channel": connected(socket.AF_UNIX, LISTENER_PREFIX + name),
        "other": connected(socket.AF_UNIX, b"\0other-" + name),
        "pair": (None, *socket.socketpair()),
    }
    store = connected(socket.AF_INET, ("127.0.0.1", 0))
    connections = RankConnections(store[0].getsockname()[1])
    for _ in range(2):  # as it is done again and again
        connections.shut(with_store=not spared)
    again = socket.create_connection(ours["tcp"][0].getsockname())  # it still listens
    return {kind: is_open(ends[1]) for kind, ends in ours.items()} | {
        "store": is_open(store[1]),
        "later": is_open(again),
    }


def test_connections_within_the_host_are_shut_but_that_to_the_store_and_those_of_others(
    rank_pool: Any,
) -> None:
    after = {"tcp": False, "channel": False, "other": True, "pair": True, "later": True}
    assert rank_pool.run(shut, True, ranks=1) == [after | {"store": True}]
    assert rank_pool.run(shut, False, ranks=1) == [after | {"store": False}]


def user_connections(port: int) -> dict[str, bool]:
    """Which connections to a server of the user's, and to a worker that a rank has forked, stay open."""
    logger = socket.create_connection(("127.0.0.1", port))
    _listener, client, worker_end = connected(socket.AF_INET, ("127.0.0.1", 0))
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    worker_end.close()  # from now on the worker has it alone, as that of a rank that was lost
    RankConnections(None).shut()
    worker.kill()
    worker.join()
    return {"logger": is_open(logger), "worker": is_open(client)}


def test_connections_to_other_programs_stay_open_and_those_to_workers_of_lost_ranks_do_not(
    rank_pool: Any,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = rank_pool.run(user_connections, server.getsockname()[1], ranks=1)
    assert found == [{"logger": True, "worker": False}]


def test_connections_to_other_hosts_of_the_world_are_shut_and_those_to_further_hosts_are_not() -> None:
    def connection_to(host: str) -> tuple[socket.socket, socket.socket]:
        server = socket.create_server((host, 0))
        return server, socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))

    with ExitStack() as stack:
        ends = {
            name: [stack.enter_context(end) for end in connection_to(host)]
            for name, host in {"rank": "127.0.0.2", "store": "127.0.0.2", "outside": "127.0.0.3"}.items()
        }
        connections = RankConnections(ends["store"][0].getsockname()[1], frozenset({"127.0.0.2"}))
        for with_store in (False, True):
            connections.shut(with_store=with_store)
            found = {name: is_open(client) for name, (_, client) in ends.items()}
            assert found == {"rank": False, "store": not with_store, "outside": True}


def freed(folder: Path) -> str:
    """The error of a receive from a rank that lives and never sends."""
    if dist.get_rank() == 1:
        while not (folder / "freed").exists():
            time.sleep(0.01)
        return ""
    threading.Timer(0.1, RankConnections(None).shut).start()
    try:
        dist.recv(torch.ones(1), 1)
    except RuntimeError as error:
        (folder / "freed").touch()
        return str(error)
    return "received"


def test_a_receive_from_a_living_rank_ends_when_connections_are_shut(rank_pool: Any, tmp_path: Path) -> None:
    error, _ = rank_pool.run(freed, tmp_path, ranks=2, timeout=20.0)
    assert "closed" in error


@pytest.mark.parametrize("blocks", [True, False])
def test_a_shared_socket_leaves_the_connection_as_blocking_as_it_is(
    blocks: bool,
) -> None:
    """Also where a program has set a default timeout, by which Python makes sockets non-blocking."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(blocks)
        socket.setdefaulttimeout(5.0)
        try:
            shared_socket(here.fileno()).close()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(here.fileno()) == blocks
