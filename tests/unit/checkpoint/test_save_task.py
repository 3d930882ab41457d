"""What ranks tell each other through the folder of a checkpoint, and when they stop to wait."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.checkpoint import save_task
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import unfinished_path
from plait.checkpoint.manifest import FileEntry, Manifest, TensorEntry, read_manifest
from plait.checkpoint.save_task import (
    ManifestPart,
    PendingSave,
    SaveTask,
    commit,
    merge_parts,
    write_rank_file,
)
from plait.checkpoint.tensor_file import BoxToWrite
from plait.plan.layout.shards import full_box

PART = ManifestPart({"model.x": TensorEntry((2,), "float32")})


class Time:
    """A second for each sleep, in which `happens` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 0.0, list[float]()
        self.happens: Any = lambda now: None
        monkeypatch.setattr(save_task, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(save_task, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += 1
        self.happens(self.now)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def tasks(tmp_path: Path) -> list[SaveTask]:
    """Of two ranks, of which each writes a file; the folder is there."""
    path = tmp_path / "one"
    unfinished_path(path).mkdir()
    found = []
    for rank in range(2):
        mesh: Any = SimpleNamespace(rank=rank, world=2, timeout=20.0)
        part = ManifestPart({f"model.{rank}": TensorEntry((2,), "float32")})
        read = partial(torch.full, (2,), float(rank))
        item = BoxToWrite(f"model.{rank}", full_box((2,)), torch.float32, read)
        found.append(SaveTask(path, mesh, [item], part, Manifest({}, ()), Disk()))
    return found


def test_the_manifest_is_what_the_ranks_have_written(tasks: list[SaveTask], time: Time) -> None:
    order = []
    task = replace(tasks[0], before_commit=lambda: order.append(tasks[0].path.exists()))
    write_rank_file(task)
    time.happens = lambda now: write_rank_file(tasks[1]) if now == 3 else None
    commit(task)
    assert order == [False]
    manifest = read_manifest(task.path)
    assert manifest.tensors == tasks[0].part.tensors | tasks[1].part.tensors
    assert [(file.name, [box.tensor for box in file.boxes]) for file in manifest.files] == [
        ("rank-00000.safetensors", ["model.0"]),
        ("rank-00001.safetensors", ["model.1"]),
    ]
    assert sorted(one.name for one in task.path.iterdir()) == [
        "manifest.json",
        *(file.name for file in manifest.files),
    ]
    assert time.slept == pytest.approx([0.02, 0.12, 0.22])


def test_rank_0_waits_for_a_rank_while_the_folder_grows(tasks: list[SaveTask], time: Time) -> None:
    """Half the collectives' timeout after the last change, and never more than a second between looks."""
    write_rank_file(tasks[0])
    folder = unfinished_path(tasks[0].path)
    time.happens = lambda now: (folder / f"more {now:g}").touch() if now in (8, 16) else None
    with pytest.raises(Exception, match=r"^rank 1 has written nothing for 10 s and is not done$"):
        commit(tasks[0])
    assert 16 + 10 < time.now < 16 + 10 + 4
    assert max(time.slept) == 1.0
    write_rank_file(tasks[1])
    commit(tasks[0])
    assert read_manifest(tasks[0].path).files


def test_every_rank_names_the_rank_whose_save_failed(tasks: list[SaveTask], time: Time) -> None:
    """The rank that failed makes room for its message; rank 0 removes the folder, which ends all waits."""

    class Full(Disk):
        def create(self, path: Path) -> Any:
            if path.suffix == ".safetensors":
                path.write_text("much")
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return super().create(path)

    folder = unfinished_path(tasks[0].path)
    time.happens = lambda now: PendingSave(tasks[0], background=False) if now == 2 else None
    failed = PendingSave(replace(tasks[1], disk=Full()), background=False)
    place = folder / "rank-00001.safetensors"
    assert failed.error == (
        f"the checkpoint {tasks[0].path} was not written (rank 1: No space left on device: {place}): make "
        "room, or choose another folder; older checkpoints are as they were."
    )
    assert not folder.exists()
    assert [*folder.parent.iterdir()] == []
    folder.mkdir()
    write_text = "rank 1: No space left on device"
    (folder / "rank-00001.failed").write_text(write_text)
    first = PendingSave(tasks[0], background=False)
    assert f"was not written ({write_text}): make room" in first.error
    assert not folder.exists()
    late = PendingSave(tasks[1], background=False)
    assert f"(rank 1 stopped, since {folder} was removed)" in late.error
    assert (first._severity, failed._severity, late._severity) == ("2", "3", "2")


def test_a_rank_gives_up_a_save_whose_rank_0_writes_nothing(tasks: list[SaveTask], time: Time) -> None:
    pending = PendingSave(tasks[1], background=False)
    assert "(rank 0 has written nothing for 10 s and is not done)" in pending.error
    failed = unfinished_path(tasks[1].path) / "rank-00001.failed"
    assert failed.read_text() == "rank 0 has written nothing for 10 s and is not done"


def test_an_unexpected_exception_in_a_save_is_reported_with_its_type(
    tasks: list[SaveTask], time: Time
) -> None:
    def breaks() -> torch.Tensor:
        raise KeyError("x")

    task = replace(tasks[0], items=[replace(tasks[0].items[0], read=breaks)])
    assert "(rank 0: KeyError('x'))" in PendingSave(task, background=False).error


def test_a_rank_waits_until_it_sees_the_checkpoint_folder(tmp_path: Path, time: Time) -> None:
    assert not save_task.wait_for_folder(tmp_path / "here", 5.0)
    assert (time.now, {*time.slept}) == (6.0, {0.02})
    time.happens = lambda now: (tmp_path / "here").mkdir() if now == 8 else None
    assert save_task.wait_for_folder(tmp_path / "here", 5.0)
    assert time.now == 8.0


def test_groups_of_ranks_are_numbered_together() -> None:
    """Of equal options the first of a rank is the first of every rank."""

    def part(rates: list[float], group_of: dict[str, int], **more: Any) -> ManifestPart:
        groups = [{"lr": rate} for rate in rates]
        optimizer = {"class": "SGD", "groups": groups, "group_of": group_of, "plain": {}} | more
        return replace(PART, optimizer=optimizer, file=FileEntry("x", 1, "", ()))

    parts = [
        part([0.5, 0.1, 0.5], {"a": 0, "b": 1, "c": 2}, plain={"a": {"n": 1}}),
        part([0.1, 0.5, 0.5, 0.2], {"d": 0, "e": 1, "f": 2, "g": 3}, plain={"d": {"n": 2}}),
        PART,
    ]
    merged = merge_parts(Manifest({}, ()), parts)
    assert merged.optimizer == {
        "class": "SGD",
        "groups": [{"lr": 0.5}, {"lr": 0.1}, {"lr": 0.5}, {"lr": 0.2}],
        "group_of": {"a": 0, "b": 1, "c": 2, "d": 1, "e": 0, "f": 2, "g": 3},
        "plain": {"a": {"n": 1}, "d": {"n": 2}},
    }
    assert len(merged.files) == 2
    both = [part([0.1], {name: 0}, class_of={name: kind}) for name, kind in (("a", "SGD"), ("b", "Adam"))]
    assert (merge_parts(Manifest({}, ()), both).optimizer or {})["class_of"] == {"a": "SGD", "b": "Adam"}
    assert merge_parts(Manifest({}, ()), [PART]).optimizer is None
