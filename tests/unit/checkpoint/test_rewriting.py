"""`convert`: the same bits in other files, with little memory; and what becomes of what goes wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from parity.full_disk import Full
from parity.memory import MEASURED, Watching, anonymous
from parity.one_rank import CONTEXT, MODELS, VOCAB, cut, engine_of, lively, tensors_in
from plait.checkpoint.file_system_calls import Disk, write_text
from plait.checkpoint.folders import unfinished_path
from plait.checkpoint.inspecting import summary
from plait.checkpoint.manifest import FILE, Manifest, TensorEntry, manifest_text, read_manifest
from plait.checkpoint.rewriting import convert
from plait.checkpoint.tensor_file import BoxToWrite, TensorFileReader, write_file
from plait.errors import CheckpointError
from plait.plan.layout.shards import full_box

STATE = {"step": 3, "config": {"model": {"name": "gpt2", "heads": 6}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, with an optimizer, of one rank, `whole`, and of three, `cut`."""
    engine = engine_of(lively(MODELS["gpt2"]()))
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-2)
    tokens = torch.randint(VOCAB, (2, CONTEXT + 1))
    engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
    engine.step(optimizer, 1.0)
    made = tmp_path_factory.mktemp("trained")
    plait.save(engine, optimizer, made / "whole", STATE)
    cut(made / "whole", made / "cut")
    return made


@pytest.fixture
def trained(folder: Path, tmp_path: Path) -> Path:
    """Both, copied: the folder of three ranks."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path / "cut"


@pytest.mark.parametrize("most", [None, 9000, 1])
def test_converting_a_checkpoint_keeps_every_bit(most: int | None, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "target"
    convert(trained, target, max_bytes=most)
    before, after = read_manifest(trained), read_manifest(target)
    assert replace(after, files=()) == replace(before, files=())
    assert after.optimizer is not None
    assert after.state == STATE
    ours, theirs = tensors_in(trained), tensors_in(target)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape)
        assert value.numpy().tobytes() == theirs[name].numpy().tobytes(), name
    boxes = [box for file in after.files for box in file.boxes]
    assert sorted(box.tensor for box in boxes) == sorted(after.tensors)
    assert sum(len(file.boxes) for file in before.files) > 2 * len(boxes)
    assert not summary(target, check=True).flaws
    if most is None:
        assert [file.name for file in after.files] == ["tensors.safetensors"]
    else:
        assert all(file.bytes <= most or len(file.boxes) == 1 for file in after.files)
    assert len(after.files) == {None: 1, 9000: len(after.files), 1: len(boxes)}[most]
    assert sorted(entry.name for entry in target.parent.iterdir()) == ["target"]


def test_a_converted_checkpoint_is_loaded_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    convert(trained, tmp_path / "target")
    engine = engine_of(lively(MODELS["gpt2"]()))
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.5), lr=1.0)
    assert plait.load(engine, optimizer, tmp_path / "target") == STATE
    assert optimizer.param_groups[0]["lr"] == 1e-2
    plait.save(engine, optimizer, tmp_path / "again", STATE)
    ours, theirs = tensors_in(trained), tensors_in(tmp_path / "again")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def convert_and_watch(source: Path, folder: Path) -> tuple[int, int]:
    """The largest tensor that is read, and the bytes by which this process grows on the way."""
    largest, plain = 0, TensorFileReader.read

    def counted(*arguments: object) -> torch.Tensor:
        nonlocal largest
        found = plain(*arguments)  # type: ignore[arg-type]
        largest = max(largest, found.nbytes)
        return found

    disk = Watching()
    convert(source, folder / "warm", max_bytes=5_000_000)  # what a first time leaves is not counted
    before = anonymous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFileReader, "read", counted)
        convert(source, folder / "target", disk=disk)
    return largest, disk.peak - before


@pytest.mark.skipif(not MEASURED, reason="there is no measure of memory here")
def test_converting_holds_one_tensor_in_memory_at_a_time(rank_pool: Any, tmp_path: Path) -> None:
    """In a process of its own: what other tests have left in the heap would count."""
    tensors, elements = 24, 1 << 20
    source = tmp_path / "source"
    source.mkdir()
    names = [f"model.{number}" for number in range(tensors)]
    box, zeros = full_box((elements,)), torch.arange(elements, dtype=torch.float32)
    file = write_file(
        source / "x.safetensors",
        [BoxToWrite(name, box, zeros.dtype, lambda: zeros) for name in names],
        Disk(),
    )
    manifest = Manifest({name: TensorEntry((elements,), "float32") for name in names}, (file,))
    write_text(Disk(), source / FILE, manifest_text(manifest))
    ((largest, grown),) = rank_pool.run(convert_and_watch, source, tmp_path, ranks=1)
    assert largest == zeros.nbytes
    assert grown < tensors * zeros.nbytes / 3, "a few, with what the heaps of threads keep"


def test_converting_a_damaged_or_missing_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="nowhere is no folder: give the folder of a checkpoint"):
        convert(tmp_path / "nowhere", target)
    with pytest.raises(CheckpointError, match="cut is there already: choose a path that is free"):
        convert(trained, trained)
    with pytest.raises(CheckpointError, match="at most 0 bytes hold nothing: give a larger size"):
        convert(trained, target, max_bytes=0)
    file = trained / "rank-00001.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-5] ^= 1
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"is damaged: rank-00001.safetensors has a damaged optim\."):
        convert(trained, target)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is missing"):
        convert(trained, target)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut", "whole"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir()
    trained.rename(tmp_path / "run" / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: give .*run/checkpoints, which does"):
        convert(tmp_path / "run", target)


def test_a_checkpoint_that_waits_under_another_name_is_not_written_over(
    trained: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    trained.rename(unfinished_path(target))
    with pytest.raises(CheckpointError, match="target is there already"):
        convert(tmp_path / "whole", target)
    assert read_manifest(unfinished_path(target)).state == STATE


def test_a_checkpoint_may_be_converted_into_an_empty_folder(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    convert(trained, tmp_path / "target")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut", "target", "whole"]


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_full_disk_leaves_no_converted_checkpoint(room: int, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"target was not written \(No space left on device\)"):
        convert(trained, tmp_path / "target", max_bytes=9000, disk=Full(room))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut", "whole"]
