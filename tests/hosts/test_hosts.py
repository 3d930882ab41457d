"""Several hosts: what a run does when a cable is pulled, a host vanishes, and messages are late or lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .network import Host, hosts, why_not

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TIMEOUT = 20.0
"""Seconds: long enough for the end of four processes on a busy machine to count for little."""
HERE = Path(__file__).parent

SUMS = """
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


def torchrun(
    machines: Sequence[Host], ranks_per_host: int, *words: str | Path
) -> list[subprocess.Popen[str]]:
    """Start torchrun on each host, with so many ranks."""
    program = Path(sys.executable).with_name("torchrun")
    meeting = ["--master-addr", machines[0].name, "--master-port", "29511"]
    sizes = ["--nnodes", str(len(machines)), "--nproc-per-node", str(ranks_per_host)]
    return [
        host.start_program(program, *sizes, "--node-rank", str(number), *meeting, *words)
        for number, host in enumerate(machines)
    ]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Block until `condition` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def end(agents: Sequence[subprocess.Popen[str]]) -> None:
    """Close the outputs of programs whose hosts have killed them."""
    for agent in agents:
        agent.communicate(timeout=30)


def losses(folder: Path) -> list[float]:
    """Return the last loss that a run in `folder` wrote for each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    by_step = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return [by_step[step] for step in sorted(by_step)]


def test_all_ranks_end_when_hosts_lose_each_other(tmp_path: Path) -> None:
    """Also on the host that cannot reach the store: a timeout passes once, and what follows takes a share."""
    script = tmp_path / "script.py"
    script.write_text(SUMS)
    with hosts(2, tmp_path) as machines:
        agents = torchrun(machines, 2, script, str(TIMEOUT), tmp_path)
        told = [tmp_path / f"rank-{rank}" for rank in range(4)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in told), "the ranks have not begun")
        machines[1].unplug()
        time.sleep(1.3 * TIMEOUT)
        for number, host in enumerate(machines):
            own = [file.read_text() for file in told[2 * number : 2 * number + 2]]
            running = [
                process for process in own if host.run("test", "-e", f"/proc/{process}").returncode == 0
            ]
            assert running == [], "after 1.3 times the timeout"
        for number, agent in enumerate(agents):
            errors = agent.communicate(timeout=30)[1]
            for rank in (2 * number, 2 * number + 1):
                assert f"rank {rank} waits for " in errors


def undisturbed(folder: Path) -> list[float]:
    """Return the losses of the same run on two ranks of this host."""
    program = Path(sys.executable).with_name("torchrun")
    words = [program, "--standalone", "--nproc-per-node", "2", HERE / "training.py", folder, "undisturbed"]
    subprocess.run(words, check=True, capture_output=True)
    return losses(folder)


def test_a_host_that_vanished_comes_back_to_the_copy_that_another_host_has(tmp_path: Path) -> None:
    """Its memory is gone. Both hosts are started again, as a scheduler would, and one step is done again.

    The other host has a copy of the snapshot before the last one, which was still to be sent.
    """
    expected = undisturbed(tmp_path / "expected")
    with hosts(2, tmp_path) as machines:
        words = (HERE / "training.py", tmp_path / "run", "hosts")
        first = torchrun(machines, 1, *words, "--stop-at", "5")
        stopped = tmp_path / "run" / "stopped"
        wait_for(stopped.exists, "the run has not come to step 5")
        machines[1].vanish()
        machines[0].kill_programs()
        end(first)
        machines[1].start()
        again = torchrun(machines, 1, *words)
        outputs = [agent.communicate(timeout=90) for agent in again]
        assert [agent.returncode for agent in again] == [0, 0], outputs
    assert losses(tmp_path / "run") == expected
    report = json.loads((tmp_path / "run" / "rank-1.json").read_text())
    assert report == {"begins_after": 4, "checkpoints_read": 0}


def test_late_and_lost_messages_change_no_number(tmp_path: Path) -> None:
    with hosts(2, tmp_path, delay=0.01, loss=0.01) as machines:
        agents = torchrun(machines, 1, HERE / "training.py", tmp_path / "run", "late")
        outputs = [agent.communicate(timeout=90) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], outputs
        assert machines[0].switch.carried > 1000
    assert losses(tmp_path / "run") == undisturbed(tmp_path / "expected")
