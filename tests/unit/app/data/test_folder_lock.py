"""One process at a time prepares a folder; others are refused, or wait while there is progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from clock import Clock

from plait.app.data import preparation_folder as folder_lock
from plait.app.data.preparation_folder import LOCK, locked_preparation
from plait.errors import DataError

HOLDING = """
import sys, time
from pathlib import Path
from plait.app.data.preparation_folder import locked_preparation
with locked_preparation(Path(sys.argv[1]), 0):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_process_preparing_one_folder_is_refused_naming_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with (
        locked_preparation(folder, 0),
        pytest.raises(DataError, match=rf"is being prepared by process {os.getpid()} on .+: wait until"),
        locked_preparation(folder, 0),
    ):
        raise AssertionError("both have the lock")
    with locked_preparation(folder, 0):
        assert [one.name for one in folder.iterdir()] == [LOCK]
    assert not list(folder.iterdir())


def test_a_process_waits_for_a_locked_folder_while_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 20 seconds, with a patience of 3."""
    with ExitStack() as held:
        held.enter_context(locked_preparation(tmp_path, 0))

        def happens(second: int) -> None:
            (tmp_path / "tokens").write_bytes(b"x" * (second // 2))
            if second == 20:
                held.close()

        monkeypatch.setattr(folder_lock, "time", clock := Clock(happens))
        with locked_preparation(tmp_path, 3):
            assert clock.now == 20


def test_a_process_does_not_wait_for_a_locked_folder_that_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "time", clock := Clock(lambda second: None))
    match = r"by process \d+ on .+, and has written nothing for 3 seconds: wait until it has"
    with (
        locked_preparation(tmp_path, 0),
        pytest.raises(DataError, match=match),
        locked_preparation(tmp_path, 3),
    ):
        raise AssertionError("both have the lock")
    assert clock.now == 3


def test_a_killed_process_holds_no_lock_of_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(DataError, match=f"process {process.pid} on"), locked_preparation(tmp_path, 0):
        raise AssertionError("both have the lock")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with locked_preparation(tmp_path, 0):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on")


def test_a_preparation_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match=r"file cannot be made .File exists.: choose another folder"),
        locked_preparation(tmp_path / "file", 0),
    ):
        raise AssertionError("it was made")
