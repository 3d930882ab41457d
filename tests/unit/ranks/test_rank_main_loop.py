"""What a pool sends to a rank's process, and what ends it: the pool's word, or the end of its parent."""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from contextvars import copy_context
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import patch

import pytest

from plait.ranks.launch import rank_main_loop
from plait.ranks.launch.rank_job import RankJob, start_method
from plait.ranks.launch.rank_main_loop import BECOMES_SPARE, END
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.launcher_environment import World
from plait.ranks.run_kept_in_memory import KeptRun, keep_run


class Ended(BaseException):
    """Stands for the end of the process."""


def test_a_job_has_what_the_pool_was_given_and_the_state_of_the_caller() -> None:
    pool = RankPool(9, threads=3, timeout=4.5, device="cuda", ranks_per_gpu=2)
    assert pool._job(b"call", "/run", 1, 2) == RankJob(
        call=b"call",
        world=World(1, 2, 1, 2, "plait", "file:///run/store"),
        folder="/run",
        environment=dict(os.environ),
        directory=os.getcwd(),
        path=sys.path,
        main_file=getattr(sys.modules["__main__"], "__file__", None),
        start_method=start_method(),
        threads=3,
        timeout=4.5,
        device="cuda",
        ranks_per_gpu=2,
    )


@pytest.mark.parametrize("state", ["idle", "busy", "done", "told to end"])
def test_a_rank_ends_when_it_is_told_to_or_its_parent_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str
) -> None:
    """Only one that is at work says so, and removes the files of its run: its parent cannot do it."""

    def end(reason: object) -> NoReturn:
        raise Ended(reason)

    monkeypatch.setattr(rank_main_loop, "end_process", end)
    monkeypatch.setattr(rank_main_loop, "end_orphan", end)
    run, busy, jobs = tmp_path / "run", Event(), SimpleQueue[RankJob]()
    run.mkdir()
    job = RankJob(
        call=b"",
        world=World(3, 4, 3, 4, "plait", f"file://{run}/store"),
        folder=str(run),
        environment={},
        directory="/",
        path=[],
        main_file=None,
        start_method="fork",
        threads=1,
        timeout=1.0,
        device="cpu",
    )
    parent, connection = Pipe()
    if state != "idle":
        parent.send_bytes(pickle.dumps(job))
    if state == "told to end":
        parent.send_bytes(pickle.dumps(END))
    if state == "done":
        monkeypatch.setattr(busy, "set", lambda: None)  # as if cleared at once
    parent.close()
    with pytest.raises(Ended) as ended:
        rank_main_loop._listen(connection, jobs, busy)
    gone = "rank 3: the process that started it is gone"
    assert ended.value.args == ({"busy": gone, "told to end": 0}.get(state, 1),)
    assert run.exists() == (state != "busy")
    assert jobs.empty() == (state == "idle")
    assert jobs.empty() or jobs.get() == job


def test_a_process_that_becomes_a_spare_frees_the_run_that_it_has_kept(tmp_path: Path) -> None:
    """In the thread that runs jobs, which has kept it, and before the next job."""
    jobs: SimpleQueue[RankJob | str] = SimpleQueue()
    parent, connection = Pipe()
    job = RankPool(1)._job(b"call", str(tmp_path), 0, 1)
    for message in (BECOMES_SPARE, job, END):
        parent.send_bytes(pickle.dumps(message))
    parent.close()

    def keep_and_wait() -> tuple[bool, RankJob, bool]:
        engine = Event()
        kept = weakref.ref(engine)
        keep_run(KeptRun(engine, None, 1, {}, {}))
        del engine
        return kept() is None, rank_main_loop._next_job(jobs), kept() is None

    with patch.object(rank_main_loop, "end_process", side_effect=Ended), pytest.raises(Ended):
        rank_main_loop._listen(connection, jobs, Event())
    assert copy_context().run(keep_and_wait) == (False, job, True)


def test_a_rank_whose_output_nobody_reads_still_sends_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []

    def refuse() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=refuse))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: flushed.append(1)))
    rank_main_loop._flush_output()
    assert flushed == [1]
