"""The manifest of a checkpoint: its tensors, files and state, with checksums of everything.

    {"plait_checkpoint": 1, "checksum": "9f3ac2d1", "content": {…}}

The manifest is JSON and is written last: a folder without it, or with a wrong checksum of its content, is no
checkpoint. Of each file it holds the size and a checksum of the header, and of each box of a global tensor
the position in the file and a checksum. Checksums are CRC-32: they detect every single damaged byte and burst
of 32 bits, but do not protect against deliberate changes.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.checkpoint.manifest_schema import schema_error
from plait.errors import CheckpointError
from plait.layout import Box

FILE = "manifest.json"
FORMAT = 1
TAKE_ANOTHER = ": take another checkpoint."
"""The end of error messages about a damaged manifest."""


class StoredBox(NamedTuple):
    """A box of a global tensor in a file."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Position of the first byte in the file."""
    checksum: str

    @property
    def box(self) -> Box:
        """The stored part's offset and size along each dim of the global tensor."""
        return Box(self.offsets, self.sizes)

    @property
    def key(self) -> str:
        """The name of the box in the file."""
        return key_of(self.tensor, self.box)


@dataclass(frozen=True)
class FileEntry:
    """A safetensors file of a checkpoint, in its manifest."""

    name: str
    bytes: int
    header: str
    """The checksum of the bytes before the first box."""
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor of a checkpoint, in its manifest."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the `torch.dtype`, such as `float32`."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> TensorEntry:
        """Return the entry of a tensor of this shape and dtype."""
        return cls(tuple(shape), str(dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a `torch.dtype`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    tensors: Mapping[str, TensorEntry]
    """By key: `model.NAME` of a parameter or buffer, `optim.state.NAME.KEY` of optimizer state."""
    files: tuple[FileEntry, ...]
    optimizer: Mapping[str, Any] | None = None
    """Class ("": unknown), options of each group, group of each parameter, state that is no tensor."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What else a step depends on, see `Engine.run_state`; empty in a checkpoint that was imported."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The user's own state."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan under which the checkpoint was saved, for information."""
    versions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """For each further name of a shared parameter, the name under which it is saved, without `model.`."""

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(file.bytes for file in self.files)


def key_of(tensor: str, box: Box) -> str:
    """Return the name of a box in a safetensors file, such as `model.head.weight[0:64,0:32]`."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"{tensor}[{','.join(ranges)}]"


def section(state: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the mapping at the nested keys `names` of a user's state; empty where there is none."""
    found: Any = state
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest file, which `read_manifest` reads."""
    content = json.dumps(_plain(manifest), separators=(",", ":"))
    return f'{{"plait_checkpoint":{FORMAT},"checksum":"{checksum(content.encode())}","content":{content}}}\n'


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. Raises CheckpointError if missing or damaged."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint, or was never finished: it has no {FILE}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): take another checkpoint.") from None
    try:
        whole = json.loads(text)
        version = whole["plait_checkpoint"]
        content = text[text.index('"content":') + len('"content":') : text.rindex("}")]
        is_intact = checksum(content.encode()) == whole["checksum"]
    except (ValueError, KeyError, TypeError, RecursionError):
        version, is_intact = FORMAT, False
    if not is_intact:
        raise CheckpointError(f"{path} is not what was written{TAKE_ANOTHER}", damaged=True)
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, and this plait reads {FORMAT}: read it with the plait that wrote "
            "it."
        )
    problem = schema_error(whole["content"]) or next(
        filter(None, (_path_error(folder, file["name"]) for file in whole["content"]["files"])), None
    )
    if problem is not None:
        raise CheckpointError(f"{path} is ill formed ({problem}){TAKE_ANOTHER}", damaged=True)
    return _manifest(whole["content"])


def _path_error(folder: Path, name: str) -> str | None:
    """Return the error for a file name that is, or links to, a path outside of the folder; else None."""
    if not name or Path(name).name != name or "\0" in name:
        return f"files: it names {name!r}, outside of its folder"
    if (folder / name).is_symlink() and (folder / name).resolve().parent != folder.resolve():
        return f"files: {name} is a link that leads out of its folder"
    return None


def require_form(manifest: Manifest, where: Path) -> None:
    """Raise CheckpointError where a manifest, imported from `where`, breaks the schema."""
    problem = schema_error(json.loads(json.dumps(_plain(manifest))))
    if problem is not None:
        raise CheckpointError(f"{where} cannot be taken over ({problem}){TAKE_ANOTHER}")


def is_complete(folder: Path) -> bool:
    """Return whether a folder has an intact manifest; its files may still be damaged."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def checksum(data: bytes) -> str:
    """Return the CRC-32 of `data` as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


@dataclass(frozen=True)
class ManifestPart:
    """The part of a manifest that one rank contributes."""

    tensors: Mapping[str, TensorEntry]
    """All tensors of which the rank holds a piece."""
    optimizer: Mapping[str, Any] | None = None
    file: FileEntry | None = None
    """The rank's file; None until it is written."""

    def to_json(self) -> str:
        """Return the part as text, for `from_json`."""
        assert self.file is not None
        tensors = {name: vars(one) for name, one in self.tensors.items()}
        plain = {"tensors": tensors, "optimizer": self.optimizer, "file": vars(self.file)}
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ManifestPart:
        """Return the part that `to_json` wrote."""
        plain = json.loads(text)
        return cls(_tensors(plain["tensors"]), plain["optimizer"], _file(plain["file"]))


def merge_parts(head: Manifest, parts: Sequence[ManifestPart]) -> Manifest:
    """Return `head` with the tensors, files and optimizer of the parts of all ranks."""
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        tensors |= part.tensors
    optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    optimizer = _merge_optimizers(optimizers) if optimizers else None
    files = tuple(part.file for part in parts if part.file is not None)
    return replace(head, tensors=tensors, files=files, optimizer=optimizer)


def _merge_optimizers(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of the ranks' optimizers, whose groups are numbered differently on each rank.

    Groups of two ranks are the same if their options are. Where one rank has several groups with the same
    options, the first of them is the first of every rank, and so on.
    """
    groups: list[Any] = []
    numbers_of: dict[str, list[int]] = {}
    group_of: dict[str, int] = {}
    plain: dict[str, Any] = {}
    for optimizer in optimizers:
        numbers, seen = [], Counter[str]()
        for group in optimizer["groups"]:
            options = json.dumps(group, sort_keys=True)
            same = numbers_of.setdefault(options, [])
            if seen[options] == len(same):
                same.append(len(groups))
                groups.append(group)
            numbers.append(same[seen[options]])
            seen[options] += 1
        group_of |= {name: numbers[number] for name, number in optimizer["group_of"].items()}
        plain |= optimizer["plain"]
    return {"class": optimizers[0]["class"], "groups": groups, "group_of": group_of, "plain": plain}


_OTHERS = ("optimizer", "run", "state", "plan", "versions", "aliases")


def _plain(manifest: Manifest) -> dict[str, Any]:
    plain = {name: getattr(manifest, name) for name in _OTHERS}
    tensors = {name: vars(one) for name, one in manifest.tensors.items()}
    return plain | {"tensors": tensors, "files": [vars(file) for file in manifest.files]}


def _manifest(plain: Mapping[str, Any]) -> Manifest:
    others = {name: plain[name] for name in _OTHERS if name in plain}
    return Manifest(_tensors(plain["tensors"]), tuple(map(_file, plain["files"])), **others)


def _tensors(plain: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(tuple(one["shape"]), one["dtype"]) for name, one in plain.items()}


def _file(plain: Mapping[str, Any]) -> FileEntry:
    boxes = (
        StoredBox(tensor, tuple(offsets), tuple(sizes), start, crc)
        for tensor, offsets, sizes, start, crc in plain["boxes"]
    )
    return FileEntry(plain["name"], plain["bytes"], plain["header"], tuple(boxes))
