"""A rank process as its supervisor sees it, whatever happens to the process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.ranks.launch.elastic import supervised_process
from plait.ranks.launch.elastic.supervised_process import SupervisedProcess
from plait.ranks.launch.rank_job import RankJob
from plait.ranks.launch.rank_main_loop import LEAVES_BY_ENDING
from plait.ranks.launcher_environment import World


class OfLostServer(SimpleNamespace):
    """A process as multiprocessing sees it once the one that it was forked from is gone: it has ended."""

    exitcode = 255

    def join(self, seconds: float) -> None:
        """Return at once."""

    def kill(self) -> None:
        """Do nothing, as for a process that has ended."""

    def close(self) -> None:
        """Release nothing."""


@contextmanager
def sleeping() -> Iterator[tuple[SupervisedProcess, subprocess.Popen[bytes], Connection]]:
    """Yield a member, its process, and that one's end of their pipe."""
    here, there = Pipe()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        found: Any = OfLostServer(pid=child.pid)
        made = SupervisedProcess(found, here)
        try:
            yield made, child, there
        finally:
            child.kill()
            child.wait()
            made.close()
            there.close()


def job_of(folder: Path, call: bytes = b"") -> RankJob:
    world = World(1, 2, 1, 2, "plait", "file://none")
    return RankJob.of_this_process(call, world, str(folder), threads=1, timeout=1.0, device="cpu")


def test_a_process_is_killed_also_where_the_one_that_it_was_forked_from_is_gone() -> None:
    with sleeping() as (member, child, _):
        member.kill()
        assert child.wait(60) == -signal.SIGKILL
        assert member.has_ended


def test_a_process_that_ends_before_it_is_looked_at_counts_as_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    here, there = Pipe()
    found: Any = OfLostServer(pid=child.pid)
    member = SupervisedProcess(found, here)
    member.start(job_of(tmp_path))
    assert wait([*member.handles], 0)
    member.update()
    assert member.has_ended
    assert "ended with exit code 255" in str(member.report)
    member.close()
    there.close()


def test_what_a_process_sends_right_before_its_end_is_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both while the supervisor looks."""
    with sleeping() as (member, child, there):
        member.start(job_of(tmp_path))

        def end(handles: list[Any], seconds: float) -> list[Any]:
            if child.returncode is None:
                there.send_bytes(pickle.dumps(LEAVES_BY_ENDING))
                there.send_bytes(pickle.dumps(b"a result"))
                child.kill()
                child.wait()
            return wait(handles, seconds)

        monkeypatch.setattr(supervised_process, "wait", end)
        member.update()
        assert (member.has_ended, member.is_busy, member.report) == (True, False, b"a result")
        assert member.left_by_ending


def test_a_process_that_stops_within_a_message_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "_MOST_STALLED", 0.1)
    with sleeping() as (member, child, there):
        member.start(job_of(tmp_path))
        os.write(there.fileno(), (1000).to_bytes(4, "big") + b"the first part of a result")
        member.update()
        assert child.wait(60) == -signal.SIGKILL
        assert "stopped while it sent a message" in str(member.report)
    with sleeping() as (member, child, _):
        member.start(job_of(tmp_path, bytes(1 << 22)))  # more than a pipe holds
        assert child.wait(60) == -signal.SIGKILL
        assert "stopped, and takes no message" in str(member.report)
        assert (member.has_ended, member.is_busy) == (True, False)
