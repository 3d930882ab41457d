"""How soon hosts agree on a new world, beside torch's rendezvous, and how soon ranks of two hosts go on.

    .venv/bin/python benchmarks/survive/hosts.py [TURNS]

The hosts are processes of one machine, or threads where only their agreement is measured.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

import plait
from plait.ranks import all_reduce
from plait.ranks.launch.elastic.host_hub import HostRun
from plait.ranks.launch.elastic.several_hosts_rendezvous import HostPlace, SeveralHostsRendezvous

STEPS, FAILS_AT, SECONDS = 400, 100, 0.05
"""A spare has five seconds to import torch."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def agreement(
    handlers: Sequence[SeveralHostsRendezvous | DynamicRendezvousHandler], turns: int
) -> list[float]:
    """Return the seconds until all hosts have met again, each time after all have stopped."""
    seconds = []
    with ThreadPoolExecutor(len(handlers)) as threads:
        for _ in range(turns + 1):
            begin = time.monotonic()
            for _ in threads.map(lambda handler: handler.next_rendezvous(), handlers):
                pass
            seconds.append(time.monotonic() - begin)
    return seconds[1:]


def our_agreement(turns: int) -> list[float]:
    port = free_port()
    run = HostRun("benchmark", 2, 4, None)
    hosts = [SeveralHostsRendezvous(HostPlace(one, "127.0.0.1", (port,)), run, 2, 60.0) for one in range(2)]
    try:
        return agreement(hosts, turns)
    finally:
        for host in hosts:
            host.shutdown()


def agreement_of_torch(turns: int) -> list[float]:
    port = free_port()

    def handler(number: int) -> DynamicRendezvousHandler:
        store = dist.TCPStore("127.0.0.1", port, None, number == 0, wait_for_workers=False)
        backend = C10dRendezvousBackend(store, "benchmark")
        return DynamicRendezvousHandler.from_backend("benchmark", store, backend, 2, 2)

    return agreement([handler(0), handler(1)], turns)


def steps(folder: str, fails: Callable[[], None]) -> None:
    """All-reduce step after step; on the last rank something happens, once; write when the ranks go on."""
    rank, failed = dist.get_rank(), Path(folder, "failed")
    world = plait.Mesh(dp=dist.get_world_size(), timeout=60.0).group("world")
    goes_on = failed.exists()
    for step in range(STEPS):
        all_reduce(torch.ones(1), world).wait()
        if goes_on:
            Path(folder, f"goes-on-{rank}").write_text(str(time.time()))
            return
        if step == FAILS_AT and rank == world.size - 1:
            failed.write_text(str(time.time()))
            fails()
        time.sleep(SECONDS)


def lose_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_supervisor() -> None:
    os.kill(int(os.environ["PLAIT_SUPERVISOR"].partition("-")[0]), signal.SIGKILL)


def stop_supervisor() -> None:
    os.kill(int(os.environ["PLAIT_SUPERVISOR"].partition("-")[0]), signal.SIGSTOP)


KINDS = {
    "a rank is killed, a spare takes its place": (lose_rank, 1),
    "a rank is killed, a new process takes its place": (lose_rank, 0),
    "a host's supervisor is killed": (lose_supervisor, 0),
    "a host is silent": (stop_supervisor, 0),
}


def recovery(kind: str) -> float:
    """Return the seconds until all ranks that go on have done a step together."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    place |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        hosts = [
            subprocess.Popen(
                [sys.executable, __file__, kind, folder], env=os.environ | place | {"RANK": str(one)}
            )
            for one in range(2)
        ]
        hosts[0].wait(300)
        hosts[1].kill()
        hosts[1].wait()
        at = [float(path.read_text()) for path in Path(folder).glob("goes-on-*")]
        return max(at) - float(Path(folder, "failed").read_text())


def row(what: str, seconds: Sequence[float]) -> None:
    print(f"| {what} | {statistics.median(seconds):.3g} | {max(seconds):.3g} |", flush=True)


def main(turns: int) -> None:
    print("| | s, median | most |\n|---|---|---|")
    row("two hosts agree on a world", our_agreement(turns))
    row("the same by torch's DynamicRendezvousHandler", agreement_of_torch(turns))
    for kind in KINDS:
        row(kind, [recovery(kind) for _ in range(turns)])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        fails, spares = KINDS[sys.argv[1]]
        settings = plait.ranks.Elastic(spares=spares)
        plait.launch(steps, sys.argv[2], fails, ranks=4, device="cpu", timeout=60.0, elastic=settings)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
