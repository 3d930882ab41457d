"""A rank whose launcher is gone ends, and says why."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.ranks import launcher_processes
from plait.ranks.failure import process_watch as orphan_watch
from plait.ranks.failure.process_watch import OrphanWatch, end_orphan
from plait.ranks.launcher_environment import World
from plait.ranks.launcher_processes import parents_up_to_launcher

SCRIPT = """
import os, time
from plait.ranks.launch.launch import launch

def work():
    os.write(1, b"%d\\n" % os.getpid())  # one write: ranks share the pipe
    time.sleep(60)

launch(work, device="cpu")
"""


def ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def killed(command: list[str], environment: dict[str, str], ranks: int) -> tuple[list[int], str]:
    """The ranks of a launcher that is killed while they work, and what they then write."""
    with subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(ranks)]
        launcher.kill()
        _, errors = launcher.communicate(timeout=20)
    return pids, errors


@pytest.mark.full
def test_a_rank_behind_a_wrapper_ends_with_its_launcher(tmp_path: Path) -> None:
    """The launcher here is the outer shell; the inner one, which it gave a rank to, lives on."""
    (tmp_path / "script.py").write_text(SCRIPT)
    rank = f"{sys.executable} {tmp_path / 'script.py'}; true"
    launcher = ["sh", "-c", f"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 sh -c '{rank}'; true"]
    pids, errors = killed(launcher, {}, 1)
    assert ended(pids)
    assert errors == "rank 0: openmpi, which started it, is gone, so it ends.\n"


@pytest.mark.full
def test_ranks_end_with_the_agent_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    pids, errors = killed(command, {"TORCH_CPP_LOG_LEVEL": "FATAL"}, 2)
    assert ended(pids)
    assert errors.count("torchrun, which started it, is gone, so it ends.") == 2


def test_the_parents_of_a_process_up_to_its_launcher_are_found() -> None:
    """A process that was started with the variable is a wrapper; the first one without is the launcher."""
    own, parent = os.getpid(), os.getppid()
    assert parents_up_to_launcher("NO_SUCH_VARIABLE") == {own: parent}
    mark = "PLAIT_TEST_MARK"
    print_line = f"from plait.ranks.launcher_processes import parents_up_to_launcher as f; print(f('{mark}'))"
    command = ["sh", "-c", f'echo $$; {sys.executable} -c "{print_line}"; true']
    done = subprocess.run(command, env=os.environ | {mark: "1"}, capture_output=True, text=True, timeout=60)
    shell, line = done.stdout.splitlines()
    assert list(eval(line).values()) == [int(shell), own], done.stderr


def test_parents_and_runs_of_launchers_are_read_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    own, parent = os.getpid(), os.getppid()
    (above,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{parent}/status").read_text())
    assert [launcher_processes.parent_of(one) for one in (own, parent, 2**30)] == [parent, int(above), None]
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    assert launcher_processes.process_of_launcher("NO_SUCH_VARIABLE") == f"{parent}-{started}"
    read = launcher_processes._process_file
    lines = {parent: "mpirun", int(above): "hydra_pmi_proxy\0--control-port\0host:77\0"}
    monkeypatch.setattr(
        launcher_processes,
        "_process_file",
        lambda process, file: lines.get(process, "") if file == "cmdline" else read(process, file),
    )
    assert launcher_processes.run_of_launcher("NO_SUCH_VARIABLE") == "host:77"
    lines[parent] = "proxy --upstream-port=5 --rank 1"
    assert launcher_processes.run_of_launcher("NO_SUCH_VARIABLE") == "5"
    lines.clear()
    assert launcher_processes.run_of_launcher("NO_SUCH_VARIABLE") == ""


MARKS = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "pmi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


def test_a_rank_that_was_started_by_hand_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell may go away at any time."""
    for mark in MARKS.values():
        monkeypatch.delenv(mark, raising=False)
    for launcher, mark in MARKS.items():
        world = World(0, 2, 0, 2, launcher, "env://")
        assert not OrphanWatch(world).watches
        with monkeypatch.context() as patched:
            patched.setenv(mark, "0")
            assert OrphanWatch(world).watches


def test_a_rank_ends_once_one_of_its_parents_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, told, looks = {7: 5, 5: 1}, queue.Queue[str](), queue.Queue[int]()

    def parent_of(process: int) -> int:
        looks.put(process)
        return parents[process]

    monkeypatch.setattr(orphan_watch, "_PERIOD", 0.001)
    monkeypatch.setattr(orphan_watch, "parents_up_to_launcher", lambda mark: dict(parents))
    monkeypatch.setattr(orphan_watch, "parent_of", parent_of)
    monkeypatch.setattr(orphan_watch, "end_orphan", told.put)
    monkeypatch.setenv("PMI_RANK", "3")
    with OrphanWatch(World(3, 4, 0, 2, "pmi", "env://")):
        assert [looks.get(timeout=60) for _ in range(4)] == [7, 5, 7, 5]
        assert told.empty()
        parents[5] = 2
        assert told.get(timeout=60) == "rank 3: pmi, which started it, is gone"
    time.sleep(0.05)
    while not looks.empty():
        looks.get()
    time.sleep(0.05)
    assert looks.empty(), "nobody looks after the context"


def test_an_orphan_says_why_it_ends_and_ends_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a process that stands in for what it has started: a fork would end the ranks of this process."""
    child = SimpleNamespace(kill=lambda: os.write(2, b"killed"))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    read, write = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.dup2(write, 2)
            end_orphan("rank 3: its parent is gone")
        finally:
            os._exit(9)  # not reached
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == "rank 3: its parent is gone, so it ends.\nkilled"
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
