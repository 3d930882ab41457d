"""Whatever goes wrong while one is written, the newest complete checkpoint is found, and nothing is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import nn

import plait
from parity.pairs import in_quick
from plait.checkpoint import tensor_file
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import BestCheckpoint, mark_best, resolve
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.saving import start_save
from plait.checkpoint.tensor_file import BoxToWrite, find_damage, portions, write_file
from plait.engine import Engine
from plait.errors import CheckpointError
from plait.plan.layout import Box


class KilledError(BaseException):
    """The process is gone: nothing is cleaned up."""


class Faulty(Disk):
    """Counts what is done to the disk, and lets one of it fail: before it is done, or in its midst."""

    def __init__(self, at: int = -1, fault: BaseException | None = None, *, half: bool = False) -> None:
        self.done: list[str] = []
        self._at = at
        self._fault = fault
        self._half = half

    def _count(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        self.done.append(name)
        if len(self.done) - 1 >= self._at and self._fault is not None:
            if len(self.done) - 1 == self._at and self._half:
                half()
            if isinstance(self._fault, KilledError) or len(self.done) - 1 == self._at:
                raise self._fault

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", lambda: Disk.make_folder(self, path))
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        self._count("create", path.touch)
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self._count("write", lambda: file.write(data[: len(data) // 2]))
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._count("sync")
        super().sync(file)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder")
        super().sync_folder(path)

    def rename(self, path: Path, to: Path) -> None:
        self._count("rename", lambda: Disk.rename(self, path, to))
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        def some() -> None:
            next(iter(sorted(path.iterdir()))).unlink() if path.is_dir() else path.unlink()

        self._count("remove", some)
        super().remove(path)


def engine_of(value: float) -> Engine:
    """One rank, a few numbers."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    plan = plait.Plan()
    return plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)


same_engine_of = cache(engine_of)
"""For tests that only save it, or load a whole checkpoint into it."""


def check_sound(path: Path) -> float:
    """All bytes are there; gives the value that was saved."""
    manifest = read_manifest(path)
    assert {find_damage(path, one) for one in portions(manifest.files)} == {None}
    engine = same_engine_of(0.0)
    assert plait.load(engine, None, path) == manifest.state
    values = {value for parameter in engine.parameters() for value in parameter.flatten().tolist()}
    assert values == {manifest.state["value"]}
    return float(manifest.state["value"])


def save(path: Path, value: float, disk: Disk) -> None:
    start_save(same_engine_of(value), None, path, {"value": value}, None, disk=disk).wait()


def operations(do: Callable[[Disk], None], folder: Path) -> list[str]:
    counted = Faulty()
    do(counted)
    shutil.rmtree(folder)
    return counted.done


FAULTS = {"killed": KilledError(), "failed": OSError(28, "No space left on device")}
PLACES = ("beside", "in-place-of")
QUICK = (("beside", "failed", "midway"), ("in-place-of", "killed", "midway"))
"""Kills beside another leave states that `test_power_cuts` has; the full run has all."""


@pytest.mark.parametrize(
    ("place", "fault", "moment"), in_quick(product(PLACES, FAULTS, ("before", "midway")), *QUICK)
)
def test_a_disk_fault_at_any_operation_of_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, place: str, fault: str, moment: str
) -> None:
    same_name, half = place == "in-place-of", moment == "midway"

    def before(folder: Path) -> Path:
        save(folder / "step-00000001", 1.0, Disk())
        return folder / ("step-00000001" if same_name else "step-00000002")

    path = before(tmp_path / "counted")
    names = operations(lambda disk: save(path, 2.0, disk), tmp_path / "counted")
    assert {"make_folder", "create", "write", "sync", "sync_folder", "rename", "remove"} >= set(names)
    assert len(names) > 12
    seen = set()
    for at in range(len(names)):
        folder = tmp_path / str(at)
        path = before(folder)
        with pytest.raises((KilledError, CheckpointError)):
            save(path, 2.0, Faulty(at, FAULTS[fault], half=half))
        found = resolve(path) if same_name else resolve(folder)
        seen.add(check_sound(found))
        save(path, 3.0, Disk())  # what was left does not stand in the way
        assert check_sound(resolve(folder)) == 3.0
        assert [entry.name for entry in folder.iterdir() if entry.name.startswith(".")] == []
    assert seen == {1.0, 2.0}, "before it is complete the old one, after that the new one"


def test_a_disk_fault_at_any_operation_leaves_a_series_with_a_sound_newest_checkpoint(tmp_path: Path) -> None:
    """Old ones are removed only when there is a new one, and half removed ones are none."""

    def run(folder: Path, disk: Disk) -> None:
        CheckpointManager(folder, keep_last=1).finish()
        for step in (1, 2, 3):
            series = CheckpointManager(
                folder, keep_last=1, start_step=step - 1, disk=disk if step == 3 else Disk()
            )
            best = [BestCheckpoint(step, 1 / step)]
            series.save(same_engine_of(float(step)), None, step, {"value": float(step)}, best=best)
            series.finish()

    names = operations(lambda disk: run(tmp_path / "counted", disk), tmp_path / "counted")
    assert names[-1] == "remove"
    for at in range(len(names)):
        folder = tmp_path / str(at)
        with pytest.raises(CheckpointError):
            run(folder, Faulty(at, OSError(5, "Input/output error")))
        assert check_sound(resolve(folder)) in (2.0, 3.0)
        assert check_sound(resolve(folder / "best")) in (2.0, 3.0)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0, Disk())
    (file,) = read_manifest(tmp_path / "one").files
    (portion,) = portions([file])
    path = tmp_path / "one" / file.name
    sound = path.read_bytes()
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0x10]) + sound[place + 1 :])
        assert find_damage(tmp_path / "one", portion) is not None, place
    path.write_bytes(sound[:-1])
    assert find_damage(tmp_path / "one", portion) == f"has {len(sound) - 1:,} bytes and not {len(sound):,}"
    path.unlink()
    assert find_damage(tmp_path / "one", portion) == "is missing"


def test_a_manifest_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0, Disk())
    path = tmp_path / "one" / "manifest.json"
    sound = path.read_bytes()
    for place in range(0, len(sound) - 1, 3):  # the last is the end of the line
        bit = 0x80 if place % 2 else 0x01  # the first makes it no UTF-8
        path.write_bytes(sound[:place] + bytes([sound[place] ^ bit]) + sound[place + 1 :])
        with pytest.raises(CheckpointError) as refusal:
            read_manifest(tmp_path / "one")
        assert refusal.value.damaged, place  # a run that resumes takes the one before
    path.write_bytes(sound)
    assert check_sound(tmp_path / "one") == 1.0


def test_a_damaged_checkpoint_is_named_and_the_previous_one_offered(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step:08d}", float(step), Disk())
    path = tmp_path / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    message = (
        r"rank-00000\.safetensors has a damaged model\.1\.weight\[0:2,0:2\]: load .*step-00000001, the one"
    )
    engine = engine_of(7.0)
    with pytest.raises(CheckpointError, match=message):
        plait.load(engine, None, tmp_path)
    assert all(bool((parameter == 7.0).all()) for parameter in engine.parameters()), "nothing was changed"


def test_writing_ends_when_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has failed, and rank 0 has given up."""
    monkeypatch.setattr(tensor_file, "BETWEEN_SYNCS", 8)
    box, read = Box((0,), (2,)), []

    def take(number: int) -> torch.Tensor:
        read.append(number)
        if number == 1:
            (tmp_path / "here").rename(tmp_path / "gone")
        return torch.zeros(2)

    items = [BoxToWrite(f"model.{n}", box, torch.float32, partial(take, n)) for n in range(9)]
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "here" / "x.safetensors", items, Disk())
    assert read == [0, 1]


def test_a_damaged_manifest_is_named_and_the_previous_checkpoint_offered(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step:08d}", float(step), Disk())
    path = tmp_path / "step-00000002" / "manifest.json"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    for asked in (tmp_path, path.parent):
        with pytest.raises(
            CheckpointError, match=r"manifest\.json is not what was .*: load .*-00000001, "
        ) as told:
            plait.load(engine_of(7.0), None, asked)
        assert told.value.damaged
    path.unlink()
    assert check_sound(resolve(tmp_path)) == 1.0, "without one it is no checkpoint"


def test_a_series_never_removes_its_newest_checkpoint(tmp_path: Path) -> None:
    """In a folder where another run's were of more steps."""
    for step in (900, 1000):
        save(tmp_path / f"step-{step:08d}", float(step), Disk())
    mine = CheckpointManager(tmp_path, keep_last=1)
    for step in (500, 600):
        mine.save(engine_of(float(step)), None, step, {"value": float(step)})
        mine.finish()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f"step-{step:08d}" for step in (600, 900, 1000)
    ]


class Stuck(Disk):
    """Cannot remove a checkpoint."""

    def remove(self, path: Path) -> None:
        if path.is_dir():
            raise OSError(13, "Permission denied")
        super().remove(path)


def test_a_checkpoint_is_complete_although_older_ones_cannot_be_removed(tmp_path: Path) -> None:
    series = CheckpointManager(tmp_path, keep_last=1, disk=Stuck())
    for step in (1, 2):
        series.save(engine_of(float(step)), None, step, {"value": float(step)})
        if step == 1:
            series.finish()
    with pytest.raises(CheckpointError, match="is complete, but older ones cannot be removed"):
        series.finish()
    assert series.complete
    assert check_sound(resolve(tmp_path)) == 2.0


def test_a_checkpoint_of_another_model_is_refused_naming_its_tensors(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0, Disk())
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5), nn.Linear(5, 2))
    plan = plait.Plan()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    message = (
        r"missing: 1\.bias, 2\.weight, 2\.bias; of another shape: 1\.weight \(\[2, 2\] and not \[5, 2\]\)"
    )
    with pytest.raises(CheckpointError, match=message):
        plait.load(engine, None, tmp_path / "one")
    model = nn.Sequential(nn.Linear(3, 2))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    with pytest.raises(CheckpointError, match=r"another model \(unexpected: 1\.weight\)"):
        plait.load(engine, None, tmp_path / "one")


def test_saving_over_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years")
    with pytest.raises(CheckpointError, match="is there and is no checkpoint: choose a path that is free"):
        plait.save(engine_of(1.0), None, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "ten years"


def test_loading_refuses_an_optimizer_of_another_class(tmp_path: Path) -> None:
    engine = engine_of(1.0)
    optimizer = torch.optim.AdamW(engine.parameters())
    plait.save(engine, optimizer, tmp_path / "one")
    with pytest.raises(CheckpointError, match="the state of AdamW, and the optimizer is SGD"):
        plait.load(engine, torch.optim.SGD(engine.parameters()), tmp_path / "one")
    plait.save(engine, None, tmp_path / "two")
    with pytest.raises(CheckpointError, match="holds no optimizer: give None for it"):
        plait.load(engine, optimizer, tmp_path / "two")
    with pytest.raises(CheckpointError, match="nowhere is no folder"):
        plait.load(engine, None, tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["step-1", ".step-1.saving", ".step-1.replaced", ".step-1.removed", "best.json.part"]
)
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "kept").write_text("kept")
    (folder := tmp_path / "folder").mkdir()
    (folder / name).symlink_to(elsewhere / "kept" if name.endswith("part") else elsewhere)
    with suppress(CheckpointError):  # a folder that is no checkpoint is not replaced
        save(folder / "step-1", 1.0, Disk())
    mark_best(folder, [BestCheckpoint(1, 0.5)], Disk())
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]
    assert (elsewhere / "kept").read_text() == "kept"
