"""Which ranks a supervisor takes to hang, and which failures it takes to be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import CorruptionError, RankError
from plait.ranks.exchange_with_supervisor import go_on_before, note_restored, variables_of_supervisor
from plait.ranks.failure.rank_activity import Activity
from plait.ranks.failure.rank_failure import RankFailure, from_exception
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.supervisor import Supervisor


class Rank:
    """Stands in for a member: since when it waits or computes, whether it is stopped, or has ended."""

    def __init__(self, since: float, *, waits: bool, stopped: bool = False, ended: bool = False) -> None:
        self._activity, self.is_stopped = Activity(since, waits, "3F1 from rank 2"), stopped
        self.report = b"done" if ended else None
        self.failed: list[str] = []

    def idle_for(self, seconds: float) -> Activity | None:
        return self._activity if self.report is None and self._activity.since <= 10 - seconds else None

    def fail(self, summary: str) -> None:
        self.failed.append(summary)


class OtherHosts:
    """Stands in for the supervisors of other hosts: whether some of their ranks wait, or all."""

    def __init__(self, *, some: bool = False, each: bool = True) -> None:
        self._waiting = some, each
        self.told: list[tuple[object, ...]] = []

    def exchange_waiting(self, some: bool, each: bool) -> tuple[bool, bool]:
        self.told.append((some, each))
        return self._waiting

    def report(self, failure: RankFailure, last_good_step: int | None, ranks: Sequence[int] = ()) -> None:
        self.told.append((failure.summary, last_good_step, list(ranks)))

    def ranks(self, here: int) -> tuple[Sequence[int], int]:
        return range(here), here


def failed(*ranks: Rank, others: OtherHosts | None = None) -> list[list[str]]:
    """At 10 s, with a limit of 3 s."""
    fake: Any = SimpleNamespace(_running=ranks, _limit=3.0, _host=others or OtherHosts())
    Supervisor._fail_hanging(fake)
    return [rank.failed for rank in ranks]


def test_a_rank_hangs_that_computes_while_others_wait_for_the_limit() -> None:
    told = "made no progress for 3 s, while another waits for 3F1 from rank 2"
    assert failed(Rank(6, waits=True), Rank(5, waits=False), Rank(6, waits=True)) == [[], [told], []]
    assert failed(Rank(6, waits=True), Rank(8, waits=False)) == [[], []]  # it did something at 8
    assert failed(Rank(8, waits=True), Rank(5, waits=False)) == [[], []]  # nobody has waited so long yet
    assert failed(Rank(0, waits=False), Rank(0, waits=False)) == [[], []]
    assert failed(Rank(0, waits=False), Rank(0, waits=True, ended=True)) == [[], []]


def test_a_stopped_rank_hangs_whatever_it_was_doing_and_whether_or_not_others_wait() -> None:
    told = "made no progress for 3 s"
    assert failed(Rank(5, waits=True, stopped=True), Rank(0, waits=False, ended=True)) == [[told], []]
    assert failed(Rank(5, waits=False, stopped=True)) == [[told]]
    waiting = f"{told}, while another waits for 3F1 from rank 2"
    assert failed(Rank(5, waits=True, stopped=True), Rank(6, waits=True)) == [[waiting], []]


def test_of_ranks_that_all_wait_the_one_that_has_waited_longest_has_failed() -> None:
    told = "has waited for 3F1 from rank 2 for 3 s, and no rank made progress"
    ended = Rank(0, waits=False, ended=True)
    assert failed(Rank(6, waits=True), Rank(4, waits=True), ended) == [[], [told], []]
    assert failed(Rank(6, waits=True), Rank(8, waits=True)) == [[], []]


def test_ranks_of_other_hosts_that_wait_count_likewise() -> None:
    others = OtherHosts(some=True, each=False)
    assert failed(Rank(5, waits=False), others=others) == [["made no progress for 3 s"]]
    assert failed(Rank(4, waits=True), others=others) == [[]], "not all wait there, or another host decides"
    assert others.told == [(False, False), (True, True)]
    assert failed(Rank(4, waits=True), others=OtherHosts(some=True)) != [[]]


def test_failures_are_the_same_at_one_step_whichever_rank_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables_of_supervisor(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    settings = SimpleNamespace(restarts=100)
    fake: Any = SimpleNamespace(
        _folder=str(tmp_path), _seen=Counter(), _tell=told.append, _host=OtherHosts(), _settings=settings
    )
    killed = [RankFailure(rank, "was killed by SIGKILL") for rank in range(3)]
    for failure in (*killed, *killed):
        Supervisor._note(fake, failure)  # other ranks, twice each
    note_restored(10)
    for failure in (*killed, *killed):
        Supervisor._note(fake, failure)
    with pytest.raises(RankError, match=r"(?s)rank 1 was killed.* 3 times after step 10, from which"):
        Supervisor._note(fake, killed[1])
    error = from_exception(0, ValueError("bad"))
    Supervisor._note(fake, error)
    Supervisor._note(fake, replace(error, rank=2))
    with pytest.raises(RankError, match="ValueError: bad"):
        Supervisor._note(fake, replace(error, rank=1))
    assert len(told) == 14
    assert told[-1] == "rank 2 failed: ValueError: bad; the ranks go on from where the run was kept last"


@pytest.mark.parametrize(
    ("wrong", "replace", "killed"),
    [([1], True, [1]), ([0, 1], True, [0, 1]), ([1], False, [1]), ([0, 1], False, [])],
)
def test_after_wrong_bits_ranks_go_on_from_the_last_good_step_without_the_wrong_ones(
    tmp_path: Path, wrong: list[int], replace: bool, killed: list[int]
) -> None:
    """If any are left."""
    lost: list[int] = []
    others = OtherHosts()
    fake: Any = SimpleNamespace(
        _host=others, _ranks_here=[0, 1],
        _folder=str(tmp_path), _seen=Counter(), _tell=lambda text: None, _settings=Elastic(replace=replace),
        _running=[SimpleNamespace(kill=partial(lost.append, rank)) for rank in range(2)],
    )  # fmt: skip
    fake._replace_wrong = partial(Supervisor._replace_wrong, fake)
    fake._leave_out_wrong = partial(Supervisor._leave_out_wrong, fake)
    Supervisor._note(fake, from_exception(1, CorruptionError("a bit flipped", 7, wrong)))
    expected = tmp_path / "expected"
    expected.mkdir()
    go_on_before(str(expected), 7)
    assert (tmp_path / "newest_good").read_text() == (expected / "newest_good").read_text()
    assert sorted(lost) == killed
    assert [given[1:] for given in others.told] == [(7, wrong)]
