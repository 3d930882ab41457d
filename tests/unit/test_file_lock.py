"""A lock of a file: one process has it, by name, until it releases it or ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.files import owner_of, try_lock, unlock

HOLDING = """
import sys, time
from pathlib import Path
from plait.files import try_lock
file = try_lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_a_file_lock_has_one_owner_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    file = try_lock(path)
    assert file is not None
    assert try_lock(path) is None
    assert owner_of(path).startswith(f"process {os.getpid()} on ")
    unlock(path, file)
    assert not path.exists()
    assert owner_of(path) == "another process"
    again = try_lock(path)
    assert again is not None
    unlock(path, again)


def test_a_killed_process_holds_no_file_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDING, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        assert try_lock(path) is None
        assert owner_of(path).startswith(f"process {process.pid} on ")
        process.kill()
    file = try_lock(path)
    assert file is not None
    unlock(path, file)


def test_a_process_that_the_owner_has_forked_does_not_hold_its_file_lock(tmp_path: Path) -> None:
    """As a worker of a `DataLoader`, which outlives a killed rank by seconds."""
    file = try_lock(tmp_path / "a.lock")
    assert file is not None
    forked = os.fork()
    if not forked:
        signal.pause()
    try:
        file.close()
        again = None
        for _ in range(500):  # until it has run what it runs first
            again = again or try_lock(tmp_path / "a.lock")
            time.sleep(0 if again else 0.01)
        assert again is not None
        again.close()
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_taking_locks_again_and_again_leaves_nothing_to_be_done_at_each_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    for _ in range(3):
        file = try_lock(tmp_path / "a.lock")
        assert file is not None
        unlock(tmp_path / "a.lock", file)
        monkeypatch.setattr(os, "register_at_fork", lambda **what: registered.append(what))
    assert registered == []


def test_a_lock_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        try_lock(tmp_path / "missing" / "a.lock")
