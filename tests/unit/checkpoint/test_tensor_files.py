"""Files of tensors: their bytes, how they are divided, and what cannot be written or read."""

from __future__ import annotations

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import plait
from plait.checkpoint import tensor_file
from plait.checkpoint.box_reader import BoxReader, open_manifest
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.manifest import (
    FileEntry,
    Manifest,
    StoredBox,
    TensorEntry,
    manifest_text,
    read_manifest,
)
from plait.checkpoint.optimizer_options import _is_alike
from plait.checkpoint.optimizer_state import number_device
from plait.checkpoint.saving import StagingBuffer, local_boxes
from plait.checkpoint.tensor_file import (
    DTYPES,
    BoxToWrite,
    TensorFileReader,
    find_damage,
    grouped,
    portions,
    write_file,
    write_files,
)
from plait.errors import CheckpointError
from plait.plan.layout import Box
from plait.plan.layout.shards import full_box


def item(name: str, value: torch.Tensor) -> BoxToWrite:
    return BoxToWrite(name, full_box(tuple(value.shape)), value.dtype, lambda: value)


def test_a_tensor_file_has_the_size_and_checksum_of_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dtype, aligned; in whatever shards it is written and checked."""
    monkeypatch.setattr(tensor_file, "CHUNK", 5)
    values = {str(dtype): (torch.arange(6).view(2, 3) % 2).to(dtype) for dtype in DTYPES}
    values["empty"] = torch.empty(0, 3)
    values["turned"] = torch.arange(6.0).view(2, 3).t()
    items = [item(name, value) for name, value in values.items()]
    entry = write_file(tmp_path / "x.safetensors", items, Disk(), {"format": "pt"})
    data = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert 0 <= size - len(data[8 : 8 + size].rstrip()) < 8
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert (size % 8, entry.bytes, entry.name) == (0, len(data), "x.safetensors")
    assert entry.header == f"{zlib.crc32(data[: 8 + size]):08x}"
    starts = [box.start for box in entry.boxes]
    for box, end in zip(entry.boxes, [*starts[1:], len(data)], strict=True):
        value, told = values[box.tensor], header[box.key]
        assert told["data_offsets"] == [box.start - 8 - size, end - 8 - size]
        assert (told["dtype"], tuple(told["shape"])) == (DTYPES[value.dtype], tuple(value.shape))
        assert box.start % value.dtype.itemsize == 0
        assert box.checksum == f"{zlib.crc32(data[box.start : end]):08x}"
        assert data[box.start : end] == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    found = load_file(tmp_path / "x.safetensors")
    assert all(
        torch.equal(found[box.key].view(torch.uint8), values[box.tensor].contiguous().view(torch.uint8))
        for box in entry.boxes
    )
    reader = TensorFileReader(tmp_path)
    assert reader.contents("x.safetensors") == {
        box.key: (tuple(values[box.tensor].shape), values[box.tensor].dtype) for box in entry.boxes
    }
    (portion,) = portions([entry])
    assert find_damage(tmp_path, portion) is None
    (tmp_path / "x.safetensors").write_bytes(data[:8] + b" " + data[9:])
    assert find_damage(tmp_path, portion) == "has a damaged header"


def test_tensors_are_grouped_into_portions_of_at_most_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grouped([3, 4, 3, 8, 7, 1, 1, 9], lambda one: one, 7) == [[3, 4], [3], [8], [7], [1, 1], [9]]
    monkeypatch.setattr(tensor_file, "BETWEEN_SYNCS", 24)
    entry = write_file(tmp_path / "x", [item(str(n), torch.ones(n)) for n in (2, 4, 3, 9, 1)], Disk())
    empty = FileEntry("empty", 16, "", ())
    found = [(one.file.name, list(one.boxes)) for one in portions([entry, empty])]
    assert found == [("x", [0, 1]), ("x", [2]), ("x", [3]), ("x", [4]), ("empty", [])]


def test_tensor_files_of_at_most_a_size_are_numbered(tmp_path: Path) -> None:
    items = [item("n" * 9 + str(n), torch.ones(2, 50)) for n in range(5)]
    one = 400 + len("nnnnnnnnn0[0:2,0:50]") + 2 + 100 + 2 * 21
    assert [file.name for file in write_files(tmp_path, "a", items, max_bytes=None, disk=Disk())] == [
        "a.safetensors"
    ]
    for most, count in ((5 * one + 128, 1), (5 * one + 127, 2), (2 * one + 128, 3), (1, 5)):
        files = write_files(tmp_path, f"b{most}", items, max_bytes=most, disk=Disk())
        assert len(files) == count
        assert sum(len(file.boxes) for file in files) == 5
        assert all(file.bytes <= most for file in files) or most == 1
        if count > 1:
            names = [f"b{most}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
            assert [file.name for file in files] == names


def test_staging_buffers_are_reused_and_aligned() -> None:
    values = [torch.arange(3, dtype=torch.uint8), torch.arange(4.0, dtype=torch.float64), torch.ones(5)]
    staging = StagingBuffer()
    copies = staging.stage([(item(str(n), one), one) for n, one in enumerate(values)])
    assert staging.bytes == 16 + 32 + 32
    first = [copy.read() for copy in copies]
    kept = [one.clone() for one in values]
    for one in values:
        one.zero_()
    assert all(map(torch.equal, first, kept))
    assert [one.data_ptr() - first[0].data_ptr() for one in first] == [0, 16, 48]
    again = staging.stage([(item("1", values[1]), values[1])])
    assert (staging.bytes, again[0].read().data_ptr()) == (80, first[0].data_ptr())
    staging.stage([(item("big", torch.ones(21)), torch.ones(21))])
    assert staging.bytes == 96


def test_tensor_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, dtype=torch.uint16)}, tmp_path / "strange.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "plain.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "plain.safetensors").read_bytes()[:-1])
    reader = TensorFileReader(tmp_path)
    read = partial(reader.read, key="x", within=())
    other = TensorEntry((2,), "float64")
    for act, said in (
        (
            lambda: reader.contents("strange.safetensors"),
            "holds x as U16, which plait does not read: convert",
        ),
        (lambda: read("nowhere.safetensors"), r"nowhere.safetensors cannot be read \(No such file or dir"),
        (lambda: read("torn.safetensors"), r"torn.safetensors cannot be read \(.*: take another checkpoint"),
        (
            lambda: read("plain.safetensors", entry=other),
            r"holds x as torch.float32 \[2\], where the manifest",
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            act()
    assert torch.equal(read("plain.safetensors", entry=TensorEntry((2,), "float32")), torch.ones(2))


def test_manifests_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    text = manifest_text(Manifest({}, (), state={"step": 1}))
    for content, said, damaged in (
        (
            text.replace('"plait_checkpoint":1', '"plait_checkpoint":2'),
            "has format 2, and this plait reads 1",
            True,
        ),
        (text.replace('"plait_checkpoint":1', '"plait_checkpoint":true'), "is not what was written", True),
        (text.replace('"step":1', '"step":2'), "is not what was written", True),
    ):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=said) as refusal:
            read_manifest(tmp_path)
        assert refusal.value.damaged == damaged
    with pytest.raises(
        CheckpointError, match=r"is damaged: manifest.json is not what .*: take another checkp"
    ):
        open_manifest(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read \(it is a folder\)"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="is no checkpoint, or was never finished") as refusal:
        open_manifest(tmp_path / "nowhere")
    assert not refusal.value.damaged


def test_elements_that_are_missing_are_counted(tmp_path: Path) -> None:
    box = Box((0, 0), (2, 3))
    entry = write_file(
        tmp_path / "x",
        [BoxToWrite("model.w", box, torch.float32, lambda: torch.arange(6.0).view(2, 3))],
        Disk(),
    )
    assert entry.boxes[0] == StoredBox(
        "model.w", (0, 0), (2, 3), entry.boxes[0].start, entry.boxes[0].checksum
    )
    reader = BoxReader(tmp_path, Manifest({"model.w": TensorEntry((3, 3), "float32")}, (entry,)))
    found = torch.empty(1, 2, dtype=torch.float64)
    reader.fill_box(found, "model.w", Box((1, 1), (1, 2)))
    assert found.tolist() == [[4.0, 5.0]]
    with pytest.raises(CheckpointError, match=r"has 2 of the 4 elements of model\.w that are needed here"):
        reader.fill_box(torch.empty(2, 2), "model.w", Box((1, 0), (2, 2)))


class Kept(torch.optim.Optimizer):
    """Keeps what it is given."""

    elementwise = True

    def __init__(self, params: Any, kept: dict[str, Any]) -> None:
        super().__init__(params, {})
        self.state[self.param_groups[0]["params"][0]] = kept


def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    plan = plait.Plan()
    engine = plait.parallelize(
        nn.Sequential(nn.Linear(2, 2)), plan, plait.Mesh(plan), loss=plait.cross_entropy
    )
    for kept, said in (
        ({"a.b": torch.ones(2, 2)}, r"state of 0\.weight has a key 'a\.b': it must have no dot"),
        ({"a": object()}, "the optimizer has a of 0.weight = <object"),
        (
            {"a": torch.ones(2, 2, dtype=torch.complex64)},
            "is torch.complex64, which no safetensors file can hold",
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            plait.save(engine, Kept(engine.parameters(), kept), tmp_path / "one")
        assert [*tmp_path.iterdir()] == []
    assert local_boxes([], {}) == []


def test_optimizer_options_may_replace_those_of_like_type_only() -> None:
    one = torch.tensor(1.0)
    for now in (None, True, "text", 1, 1.5, one, [1, 2], (0.5, True), object()):
        assert _is_alike(now, None)
    alike = [(1, 2), (1, 2.5), (one, 3), (1.5, -1e299), ((1, 2.0), [3, 4]), ([True], [False]), ("a", "b")]
    assert all(_is_alike(now, value) for now, value in [*alike, (True, False), (object(), "any"), ((), [])])
    unlike = [
        (1, True),
        (1, "1"),
        (one, [1]),
        (1.5, 1e300),
        (1.5, -1e300),
        ((1, 2), [1]),
        ((1, 2), 3),
        ([1], ["a"]),
    ]
    assert not any(
        _is_alike(now, value) for now, value in [*unlike, (True, 1), (True, "a"), ("a", 1), ("a", [])]
    )


def test_step_counts_are_on_the_cpu_unless_the_optimizer_needs_them() -> None:
    shard, cpu = torch.empty(1, device="meta"), torch.device("cpu")
    for group, device in (({}, cpu), ({"fused": True}, shard.device), ({"capturable": True}, shard.device)):
        assert number_device("step", group, shard) == device
        assert number_device("eta", group, shard) == shard.device
