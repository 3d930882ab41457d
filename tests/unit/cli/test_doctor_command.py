from __future__ import annotations

import pytest

from plait.cli import doctor
from plait.cli.main import main
from plait.comm import host_check
from plait.comm.host_check import HostFinding


@pytest.mark.parametrize(
    ("remedy", "code", "last"),
    [("", 0, "Nothing has to be changed."), ("raise it.", 1, "change open files: raise it.")],
)
def test_findings_remedies_and_exit_code(
    remedy: str, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_check, "check_host", lambda: [HostFinding("open files", "256", remedy)])
    assert main(["doctor", "--no-ranks"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["open", "files", "256"]
    assert lines[-1] == last


@pytest.mark.full
def test_two_ranks_communicate() -> None:
    (finding,) = doctor._two_ranks()
    assert finding.found.startswith("started in ")
    assert not finding.remedy
