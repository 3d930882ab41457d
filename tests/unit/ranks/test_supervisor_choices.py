"""What a supervisor decides when ranks have failed, without processes."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import plait
from plait.errors import CommunicationError, CorruptionError, MeshError, PlaitError
from plait.ranks.failure.failure_log import RankFailure, from_exception
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
        stop=lambda: None,
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
