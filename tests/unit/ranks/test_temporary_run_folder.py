"""Folders of runs are temporary: a later run removes those of processes that were killed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.files import try_lock
from plait.ranks.launch.temporary_run_folder import run_folder

MAKES_ONE = """
import sys
from plait.ranks.launch.temporary_run_folder import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_a_folder_until_the_next_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        assert left.parent == tmp_path
        with run_folder() as own:
            assert left.is_dir()  # its process lives
            assert Path(own).parent == tmp_path
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    assert left.is_dir()
    with run_folder() as own:
        assert [*tmp_path.iterdir()] == [Path(own)]
        assert try_lock(Path(own, "launch.lock")) is None
    assert [*tmp_path.iterdir()] == []


def test_folders_of_another_kind_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of snapshots, which are needed when their run has ended, and a user's `run.dir`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "plait-snapshots").mkdir()
    (tmp_path / "plait-snapshots" / "lock").touch()
    (tmp_path / "plait-mine").mkdir()
    (tmp_path / "plait-mine" / "run.lock").touch()
    (tmp_path / "plait-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "launch.lock").touch()
    (tmp_path / "plait-ranks-link").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    with run_folder():
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_system_without_locks_has_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("plait.ranks.launch.temporary_run_folder.try_lock", fail)
    with run_folder() as one, run_folder() as other:
        assert {*tmp_path.iterdir()} == {Path(one), Path(other)}
    assert [*tmp_path.iterdir()] == []
