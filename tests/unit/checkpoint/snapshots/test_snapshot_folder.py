"""Folders of ended runs are removed, those of others stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.checkpoint.snapshots.snapshot_folder import SnapshotFolder
from plait.errors import CheckpointError
from plait.ranks.launcher_processes import process_identity


def made(base: Path, name: str, owner: str) -> SnapshotFolder:
    folder = SnapshotFolder(base, name)
    folder.make()
    folder.take(owner)
    return folder


def test_folders_of_ended_runs_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living, ended = process_identity(os.getpid()), process_identity(process.pid)
    folders = [made(tmp_path, "living", living), made(tmp_path, "ended", ended)]
    of_another_time = made(tmp_path, "same id", f"{os.getpid()}-1")
    of_another_time.release()
    in_a_container = made(tmp_path, "container", ended)
    owner = in_a_container.path / "owner.json"
    owner.write_text(json.dumps({"process": ended, "namespace": "pid:[1]"}))
    (tmp_path / "plait-other").mkdir()  # being made
    (tmp_path / "other").mkdir()
    own = made(tmp_path, "own", ended)
    own.remove_ended()
    assert all(folder.path.exists() for folder in (*folders, in_a_container, own))
    assert not of_another_time.path.exists()
    process.communicate(b"\n")
    own.remove_ended()
    assert folders[1].path.exists(), "ranks may outlive torchrun's agent: they have the lock"
    folders[1].release()
    own.remove_ended()
    assert {path.name for path in tmp_path.iterdir()} == {
        folders[0].path.name, in_a_container.path.name, own.path.name, "plait-other", "other",
    }  # fmt: skip


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SnapshotFolder(tmp_path, "run")
    (tmp_path / "elsewhere").mkdir()
    folder.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="belongs to somebody else"):
        folder.make()


def test_memory_is_as_it_was_where_a_file_has_the_size(tmp_path: Path) -> None:
    folder = made(tmp_path, "run", process_identity(os.getpid()))
    folder.mapped(0, "file", 8).fill_(7)
    assert folder.mapped(0, "file", 8).tolist() == [7] * 8
    assert folder.mapped(0, "file", 16).tolist() == [0] * 16
    assert os.stat(folder.half(0) / "file").st_blocks > 0
    folder.remove()
    assert not folder.path.exists()
