"""What is refused of torch.distributed.checkpoint, and on the way there: harm, damage, what has no place."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from test_dcp import by_torch, cut, cuts
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from mutated_files import outcome
from plait.checkpoint.dcp import export_dcp, import_dcp
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.tensor_file import TensorFileReader
from plait.errors import CheckpointError
from plait.plan.layout import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Harm:
    """A pickle of it calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.told = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.told


def harmful(victim: Path) -> dict[str, tuple[object, str]]:
    return {
        "a command": (Harm(os.system, f"touch {victim}"), "(posix|nt).system"),
        "a builtin": (Harm(eval, f"open({str(victim)!r}, 'w')"), "builtins.eval"),
        "a file": (Harm(Path.touch, victim), r"pathlib\..*Path"),
        "torch": (Harm(torch.save, {}, str(victim)), "torch.serialization.save"),
    }


@pytest.mark.parametrize("kind", harmful(Path()))
@pytest.mark.parametrize("place", ["instead", "within"])
def test_import_dcp_executes_no_code_from_pickled_metadata(tmp_path: Path, kind: str, place: str) -> None:
    source, _ = by_torch(tmp_path)
    harm, named = harmful(tmp_path / "victim")[kind]
    metadata: Metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.planner_data["x"] = harm
    (source / ".metadata").write_bytes(pickle.dumps(harm if place == "instead" else metadata))
    with pytest.raises(CheckpointError, match=named) as raised:
        import_dcp(source, tmp_path / "native")
    assert "was not run" in str(raised.value)
    assert not (tmp_path / "victim").exists()
    assert not (tmp_path / "native").exists()


def test_a_pickle_in_dcp_metadata_cannot_change_a_class(tmp_path: Path) -> None:
    """One that sets attributes of the class itself, where an object should be."""
    (tmp_path / "torch").mkdir()
    before = dict(vars(Metadata))
    for name in ("torch.distributed.checkpoint.metadata\nMetadata", "torch\nSize", "pathlib\nPosixPath"):
        slots = b"N}X\x04\x00\x00\x00evilK\x01s\x86"
        (tmp_path / "torch" / ".metadata").write_bytes(b"\x80\x02c" + name.encode() + b"\n" + slots + b"b.")
        with pytest.raises(CheckpointError, match="damaged"):
            import_dcp(tmp_path / "torch", tmp_path / "native")
    assert dict(vars(Metadata)) == before
    assert not any(hasattr(kind, "evil") for kind in (Metadata, torch.Size, tuple, type(tmp_path)))


def test_import_dcp_executes_no_code_from_pickled_entries(tmp_path: Path) -> None:
    """Of an option, which is left out; of a state, which is refused."""
    source = {
        "model": {"w": torch.ones(2)},
        "optim": {
            "state": {"w": {"exp_avg": torch.ones(2)}},
            "param_groups": [{"params": ["w"], "lr": 0.5, "hook": Harm(os.mkdir, str(tmp_path / "victim"))}],
        },
    }
    distributed.save(source, checkpoint_id=tmp_path / "torch", no_dist=True)
    import_dcp(tmp_path / "torch", tmp_path / "native")
    told = read_manifest(tmp_path / "native").optimizer
    assert told == {"class": "", "groups": [{"lr": 0.5}], "group_of": {"w": 0}, "plain": {}}
    source["optim"]["state"]["w"]["hook"] = Harm(os.mkdir, str(tmp_path / "victim"))
    distributed.save(source, checkpoint_id=tmp_path / "again", no_dist=True)
    with pytest.raises(CheckpointError, match=r"optim\.state\.w\.hook cannot be read"):
        import_dcp(tmp_path / "again", tmp_path / "other")
    assert not (tmp_path / "victim").exists()


TUPLES = b")" + b"q\x00h\x00\x86" * 40
"""A tuple of two that are the same tuple of two …: 2 ** 40 of them for what walks, prints or hashes it."""
BOMBS = {
    "a huge place in the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a huge text": b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"a.",
    "a huge number": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "a tuple as a key": b"\x80\x02}" + TUPLES + b"Ns.",
    "a tuple for the metadata": b"\x80\x02" + TUPLES + b".",
    "a dictionary of itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "nothing": b"",
    "nothing popped": b"\x80\x02a.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_few_bytes_of_metadata_take_little_time_and_memory(tmp_path: Path, bomb: str) -> None:
    (tmp_path / ".metadata").write_bytes(BOMBS[bomb])
    refusal = outcome(lambda: import_dcp(tmp_path, tmp_path / "native"))
    assert isinstance(refusal, CheckpointError)
    assert refusal.damaged


@pytest.mark.parametrize("place", ["path", "size", "name", "chunks"])
def test_nested_tuples_within_sound_metadata_take_no_time(tmp_path: Path, place: str) -> None:
    source, _ = by_torch(tmp_path)
    nested: Any = ()
    for _ in range(40):
        nested = (nested, nested)

    def nest(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.0.weight"]
        if place == "path":
            metadata.planner_data["model.0.weight"] = nested
        elif place == "size":
            entry.size = nested
        elif place == "name":
            next(iter(metadata.storage_data.values())).relative_path = nested
        else:
            entry.chunks = [entry.chunks[0]] * 100
            for number in range(1000):
                metadata.state_dict_metadata[f"a{number}"] = entry

    changed(source, nest)
    refusal = outcome(lambda: import_dcp(source, tmp_path / "native"))
    assert isinstance(refusal, CheckpointError)
    assert len(str(refusal)) < 500


def test_an_option_that_holds_itself_many_times_is_left_out(tmp_path: Path) -> None:
    nested: Any = []
    for _ in range(40):
        nested = [nested, nested]
    flat = {"model.w": torch.ones(2), "optim.state.w.m": torch.ones(2), "optim.param_groups.w.nested": nested}
    distributed.save(
        flat,
        checkpoint_id=tmp_path / "torch",
        planner=DefaultSavePlanner(False, False),
        no_dist=True,
    )
    assert outcome(lambda: import_dcp(tmp_path / "torch", tmp_path / "native")) == (
        "optim.param_groups.w.nested",
    )


class EnumsByName(pickle.Pickler):
    """Writes enums as Python 3.11.2, of Debian 12, does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_dcp_metadata_pickled_by_every_python_version_is_read(tmp_path: Path) -> None:
    source, _ = by_torch(tmp_path)
    import_dcp(source, tmp_path / "expected")
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with (source / ".metadata").open("wb") as file:
            EnumsByName(file, protocol).dump(metadata)
        import_dcp(source, tmp_path / str(protocol))
        assert read_manifest(tmp_path / str(protocol)) == read_manifest(tmp_path / "expected")


def changed(source: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((source / ".metadata").read_bytes())
    change(metadata)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


def lead_out(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = f"../torch/{place.relative_path}"


def overlap(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.0.weight"].chunks  # type: ignore[union-attr]
    chunks.append(chunks[0])


def grow(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.0.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 3])


def another_path(metadata: Metadata) -> None:
    metadata.planner_data["model.0.weight"] = ("optim", "state", "0.weight")


def no_path(metadata: Metadata) -> None:
    metadata.planner_data["model.0.weight"] = ({}, "0.weight")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def link_out(source: Path) -> None:
    (source / "__0_0.distcp").rename(source.parent / "elsewhere.distcp")
    (source / "__0_0.distcp").symlink_to(source.parent / "elsewhere.distcp")


def junk(source: Path) -> None:
    path = source / "__0_0.distcp"
    path.write_bytes(b"x" * path.stat().st_size)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda source: source.rename(source.with_name("gone")), "it has no .metadata"),
    "no metadata": (lambda source: (source / ".metadata").unlink(), "it has no .metadata"),
    "half of the metadata": (lambda source: cut_short(source / ".metadata"), "damaged"),
    "no file": (lambda source: (source / "__0_0.distcp").unlink(), "it has no file __0_0.distcp"),
    "a link": (link_out, "is a link that leads out of it"),
    "junk": (junk, "cannot be read"),
    "half of a file": (lambda source: cut_short(source / "__0_0.distcp"), "cannot be read"),
    "another folder": (lambda source: changed(source, lead_out), "it has no file ../torch/"),
    "overlapping shards": (lambda source: changed(source, overlap), "do not make up"),
    "another path": (lambda source: changed(source, another_path), "is not that of model.0.weight"),
    "no path": (lambda source: changed(source, no_path), "is no path"),
    "missing shards": (lambda source: changed(source, grow), "cannot be read"),
    "something else": (lambda source: (source / ".metadata").write_bytes(pickle.dumps({})), "damaged"),
    "text": (lambda source: (source / ".metadata").write_text("hello"), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_import_dcp_names_what_is_damaged(tmp_path: Path, damage: str) -> None:
    source, _ = by_torch(tmp_path)
    break_it, words = DAMAGES[damage]
    break_it(source)
    with pytest.raises(CheckpointError, match=words):
        import_dcp(source, tmp_path / "native")
    assert not [path for path in tmp_path.iterdir() if "native" in path.name]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "numbers": (
        {"model": {"w": torch.ones(2)}, "optim": {"state": {0: {"m": torch.ones(2)}}}},
        "of 0, and no",
    ),
    "no model": ({"step": 3, "optim": {"state": {}}}, "has no tensors of a model"),
    "complex": ({"w": torch.ones(2, dtype=torch.complex64)}, "complex64"),
    "lists": (
        {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"m": [torch.ones(2)]}}}},
        "under 'm.0'",
    ),
    "a deep plait": ({"w": torch.ones(2), "plait": "[" * 100_000}, "a key plait that plait did not write"),
    "an ill-formed plait": (
        {"w": torch.ones(2), "plait": '{"class":"","run":{"passes":-1},"state":{},"plan":{},"aliases":{}}'},
        "cannot be taken over .run",
    ),
    "another plait": ({"w": torch.ones(2), "plait": "curls"}, "a key plait that plait did not write"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_import_dcp_refuses_entries_that_no_checkpoint_can_hold(tmp_path: Path, kind: str) -> None:
    whole, words = REFUSED[kind]
    distributed.save(whole, checkpoint_id=tmp_path / "torch", no_dist=True)
    with pytest.raises(CheckpointError, match=words):
        import_dcp(tmp_path / "torch", tmp_path / "native")
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_dcp_import_and_export_overwrite_nothing(tmp_path: Path) -> None:
    native = cut(tmp_path, cuts())
    for target in (native, tmp_path):
        with pytest.raises(CheckpointError, match="choose a path that is free"):
            export_dcp(native, target)
    native.rename(tmp_path / ".native.saving")  # complete, but for its name
    with pytest.raises(CheckpointError, match="choose a path that is free"):
        export_dcp(native, native)
    (tmp_path / "dcp").mkdir()
    export_dcp(native, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="choose a path that is free"):
        import_dcp(tmp_path / "dcp", tmp_path / "dcp")


def test_export_dcp_refuses_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = cut(tmp_path / "a", cuts())
    cut_short(native / "rank-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors has"):
        export_dcp(native, tmp_path / "dcp")
    some = cuts() | {"model.flags": (torch.tensor([True, False]), [Box((0,), (1,))])}
    with pytest.raises(CheckpointError, match=r"does not have all of model\.flags"):
        export_dcp(cut(tmp_path / "b", some), tmp_path / "dcp")

    def fail(*told: object) -> Tensor:
        raise CheckpointError("the disk is gone.")

    whole = cut(tmp_path / "c", cuts())
    monkeypatch.setattr(TensorFileReader, "read", fail)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        export_dcp(whole, tmp_path / "dcp")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not written"):
        export_dcp(whole, tmp_path / "file" / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "file"]
