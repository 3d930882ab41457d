"""Two hosts, as network namespaces with a cable between them: what happens when it is pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TIMEOUT = 12.0
"""Seconds: long enough for the end of four processes on a busy machine to count for little."""
ADDRESSES = "10.77.0.1", "10.77.0.2"

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from plait.ranks import Mesh, all_reduce
from plait.ranks.launch.launch import launch

def work(timeout, folder):
    mesh = Mesh(pp=2, tp=2, timeout=timeout)
    for step in range(10**9):
        for axis in ("tp", "pp", "world"):
            all_reduce(torch.ones(8), mesh.group(axis), checked=False).wait()
        if step == 10:
            Path(folder, f"rank-{mesh.rank}").write_text(str(os.getpid()))
        time.sleep(0.01)

launch(work, float(sys.argv[1]), sys.argv[2], device="cpu", timeout=float(sys.argv[1]))
"""


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


class Host(NamedTuple):
    """A network namespace, and its end of the cable."""

    name: str
    cable: str
    address: str


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Skips where such hosts cannot be made: that takes `ip`, and root."""
    mark = f"plait{os.getpid()}"
    one, two = (Host(f"{mark}-{end}", f"p{os.getpid()}{end}", ADDRESSES[end]) for end in (0, 1))
    if shutil.which("ip") is None or not (ip("netns", "add", one.name) and ip("netns", "add", two.name)):
        pytest.skip("network namespaces cannot be made here")
    try:
        veth = ("type", "veth", "peer", "name", two.cable, "netns", two.name)
        assert ip("link", "add", one.cable, "netns", one.name, *veth)
        for host in (one, two):
            assert ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            assert all(ip("-n", host.name, "link", "set", device, "up") for device in ("lo", host.cable))
        yield one, two
    finally:
        for host in (one, two):
            ip("netns", "del", host.name)


def torchrun(host: Host, number: int, script: Path) -> subprocess.Popen[str]:
    program = str(Path(sys.executable).with_name("torchrun"))
    nodes = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"]
    meeting = ["--master-addr", ADDRESSES[0], "--master-port", "29511"]
    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, program, *nodes, *meeting, script, str(TIMEOUT), script.parent],
        env=os.environ | {"GLOO_SOCKET_IFNAME": host.cable},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_all_ranks_end_when_hosts_lose_each_other(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """Also on the host that cannot reach the store: a timeout passes once, and what follows takes a share."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    agents = [torchrun(host, number, script) for number, host in enumerate(hosts)]
    try:
        told = [tmp_path / f"rank-{rank}" for rank in range(4)]
        deadline = time.monotonic() + 90
        while not all(file.exists() and file.read_text() for file in told):
            assert time.monotonic() < deadline, "the ranks have not begun"
            time.sleep(0.05)
        ranks = [Path("/proc", file.read_text()) for file in told]
        assert ip("-n", hosts[0].name, "link", "set", hosts[0].cable, "down")
        time.sleep(1.3 * TIMEOUT)
        running = [rank for rank, process in enumerate(ranks) if process.exists()]
        assert running == [], "after 1.3 times the timeout"
        for number, agent in enumerate(agents):
            errors = agent.communicate(timeout=30)[1]
            for rank in (2 * number, 2 * number + 1):
                assert f"rank {rank} waits for " in errors
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
