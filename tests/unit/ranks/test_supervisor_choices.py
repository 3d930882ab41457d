"""What a supervisor decides when ranks have failed, without processes."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState

import plait
from plait.errors import CommunicationError, CorruptionError, MeshError, PlaitError, RankError
from plait.ranks.failure.rank_failure import RankFailure, from_exception
from plait.ranks.launch.elastic import run_elastic
from plait.ranks.launch.elastic.one_host_rendezvous import OneHostRendezvous
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.supervisor import Supervisor

KILLED = RankFailure(0, "was killed by SIGKILL")


class Told(OneHostRendezvous):
    """Keeps what other hosts would be told."""

    def __init__(self) -> None:
        super().__init__("a run")
        self.told: list[tuple[int, int | None, list[int]]] = []

    def report(self, failure: RankFailure, last_good_step: int | None, ranks: Sequence[int] = ()) -> None:
        self.told.append((failure.rank, last_good_step, list(ranks)))


def process(
    report: RankFailure | bytes | None = None, *, ended: bool = False, left: bool = False, ready: bool = False
) -> Any:
    """Stand in for a `SupervisedProcess`."""
    made = SimpleNamespace(
        report=report, has_ended=ended, left_by_ending=left, is_ready=ready, is_busy=False, handles=(),
        stop=lambda: None, become_spare=lambda: None,
    )  # fmt: skip
    made.update = lambda: None
    made.kill = partial(setattr, made, "has_ended", True)
    return made


def supervisor(
    folder: Path, running: Sequence[Any], settings: Elastic, spares: Sequence[Any] = ()
) -> tuple[Supervisor, Told]:
    def refuse(*_: object) -> Any:
        raise AssertionError("nothing is started")

    told = Told()
    made = Supervisor(len(running), settings, told, refuse, refuse, str(folder), 1.0)
    made._running, made._spares, made._ranks_here = [*running], [*spares], [*range(len(running))]
    made.cause = KILLED
    return made, told


def size_after(supervisor: Supervisor) -> int:
    """Let the ranks stop; return how many the next generation has."""
    group: Any = SimpleNamespace(spec=SimpleNamespace(local_world_size=0))
    supervisor._stop_workers(group)
    return int(group.spec.local_world_size)


@pytest.mark.parametrize("lost", [False, True])
def test_wrong_bits_that_a_rank_finds_while_it_stops_for_another_failure_are_left_out_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: bool
) -> None:
    """Also where the rank was waiting for the other one, so that its error looks like a consequence."""
    error = CorruptionError("rank 1 on host h: the value of w changed in memory", 7, [1])
    error.__context__ = CommunicationError("rank 0 is gone") if lost else None
    ranks = [process(KILLED, ended=True), process(from_exception(1, error)), process()]
    made, told = supervisor(tmp_path, ranks, Elastic())
    assert size_after(made) == 3
    assert (tmp_path / "newest_good").read_text() == "7"
    assert [one.has_ended for one in ranks] == [True, True, False]
    assert told.told == [(1, 7, [1])]
    assert "plait: rank 1 failed: plait.errors.CorruptionError: rank 1 on host h" in capsys.readouterr().err


def on_gpus(ready_spares: int, settings: Elastic, folder: Path) -> int:
    """Return the ranks after one of four was killed, and the others could leave its world only by ending."""
    ranks = [process(KILLED, ended=True), *(process(KILLED, ended=True, left=True) for _ in range(3))]
    return size_after(supervisor(folder, ranks, settings, [process(ready=True)] * ready_spares)[0])


def test_where_no_process_goes_on_the_ranks_become_fewer_only_by_those_that_are_not_to_be_replaced(
    tmp_path: Path,
) -> None:
    assert on_gpus(1, Elastic(replace="later", spares=1), tmp_path) == 4
    assert on_gpus(0, Elastic(replace="later"), tmp_path) == 4
    assert on_gpus(0, Elastic(), tmp_path) == 4
    assert on_gpus(0, Elastic(replace=False), tmp_path) == 3
    assert on_gpus(1, Elastic(replace=False, spares=1), tmp_path) == 4


@pytest.mark.parametrize(("ready", "size"), [(True, 4), (False, 3)])
def test_living_ranks_go_on_with_the_spares_that_are_ready(tmp_path: Path, ready: bool, size: int) -> None:
    ranks = [process(KILLED, ended=True), process(), process(), process()]
    settings = Elastic(replace="later", spares=1)
    assert size_after(supervisor(tmp_path, ranks, settings, [process(ready=ready)])[0]) == size


def raising(processes: int) -> int:
    raise ValueError(f"no plan of {processes}")


@pytest.mark.parametrize(
    ("ranks_of", "told"),
    [
        (raising, r"Elastic's ranks_of\(2\) raised ValueError\('no plan of 2'\)"),
        (lambda _: 1.5, r"Elastic's ranks_of\(2\) is 1.5: give a whole number"),
        (lambda _: None, r"Elastic's ranks_of\(2\) is None: give a whole number"),
    ],
)
def test_a_function_that_returns_no_number_of_ranks_is_named(
    tmp_path: Path, ranks_of: Callable[[int], Any], told: str
) -> None:
    ranks = [process(KILLED, ended=True), process(), process()]
    with pytest.raises(MeshError, match=told):
        size_after(supervisor(tmp_path, ranks, Elastic(replace=False, ranks_of=ranks_of))[0])


def test_a_run_goes_on_where_nothing_reads_what_its_supervisor_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> int:
        raise BrokenPipeError

    made, _ = supervisor(tmp_path, [process()], Elastic())
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=broken, flush=lambda: None))
    made._note(from_exception(0, ValueError("bad")))


def test_a_supervisor_that_cannot_write_its_files_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_elastic, "start_process", no_room)
    with pytest.raises(PlaitError, match=r"write to the run's folder .*plait-ranks-.* \(No space left"):
        plait.launch(print, ranks=1, elastic=True)


def test_the_failure_for_which_no_restart_is_left_ends_the_run_and_nobody_is_told_that_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, told = supervisor(tmp_path, [process()], Elastic(restarts=1))
    made._note(KILLED)
    assert "rank 0 was killed by SIGKILL; the ranks go on" in capsys.readouterr().err
    with pytest.raises(
        RankError, match=r"(?s)ValueError: bad.*failure number 2 .* Elastic's restarts allow 1"
    ):
        made._note(from_exception(0, ValueError("bad")))
    assert capsys.readouterr().err == ""
    assert len(told.told) == 1


def test_events_of_torchs_agent_ask_no_name_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str = "") -> str:
        raise AssertionError("this may take seconds")

    monkeypatch.setattr(socket, "getfqdn", refuse)
    made, _ = supervisor(tmp_path, [process()], Elastic())
    made._worker_group.workers = [Worker(0, 0)]
    with made.record_duration("RENDEZVOUS"):
        pass
    made._record_worker_events(RunResult(WorkerState.SUCCEEDED, {0: None}))


def test_processes_that_the_next_world_leaves_out_free_what_they_keep_of_the_run(tmp_path: Path) -> None:
    ranks, freed = [process() for _ in range(3)], list[int]()
    for number, one in enumerate(ranks):
        one.become_spare = partial(freed.append, number)
    made, _ = supervisor(tmp_path, ranks, Elastic(replace=False))
    made._take_places(1)
    assert freed == [1, 2]
