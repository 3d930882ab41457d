from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait.app.cli import doctor
from plait.app.cli.main import main
from plait.errors import MeshError
from plait.ranks import host_diagnostics
from plait.ranks.host_diagnostics import HostFinding
from plait.ranks.launch.rank_pool import RankPool


@pytest.mark.parametrize(
    ("remedy", "code", "last"),
    [("", 0, "Nothing has to be changed."), ("raise it.", 1, "change open files: raise it.")],
)
def test_doctor_prints_findings_and_remedies_and_exits_with_1_if_any(
    remedy: str, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_diagnostics, "check_host", lambda: [HostFinding("open files", "256", remedy)])
    assert main(["doctor", "--no-ranks"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["open", "files", "256"]
    assert lines[-1] == last


@pytest.mark.full
def test_doctor_starts_two_ranks_that_communicate() -> None:
    (finding,) = doctor._two_ranks()
    assert finding.found.startswith("started in ")
    assert not finding.remedy


def test_doctor_reports_the_start_time_of_two_ranks_or_why_they_failed(
    thread_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The all-reduces are no part of the start; one of them, on the slower rank, is a hundredth."""
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: 7.0))
    assert thread_ranks.run(doctor._all_reduces, ranks=2) == [0.0, 0.0]
    asked = []

    def launch(function: object, **options: object) -> list[float]:
        asked.append((function, options))
        return [0.001, 0.002]

    monkeypatch.setattr("plait.ranks.launch.launch.launch", launch)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=iter((10.0, 15.002)).__next__))
    assert [*doctor._two_ranks()] == [HostFinding("two ranks", "started in 5.0 s; an all-reduce takes 20 µs")]
    assert asked == [(doctor._all_reduces, {"ranks": 2, "threads": 1, "timeout": 30.0, "device": "cpu"})]

    def fails(function: object, **options: object) -> list[float]:
        raise MeshError("no port is free.\nSee the log.")

    monkeypatch.undo()
    monkeypatch.setattr("plait.ranks.launch.launch.launch", fails)
    monkeypatch.setattr(host_diagnostics, "check_host", lambda: [])
    assert [*doctor._two_ranks()] == [HostFinding("two ranks", "they failed", "no port is free.")]
    assert main(["doctor"]) == 1
