"""The manifest of a checkpoint: all that is in it, and by which sums one knows that it is all there.

    {"plait_checkpoint": 1, "checksum": "9f3ac2d1", "content": {…}}

It is JSON, written last: a folder without one, or with one whose checksum is not that of its content, is no
checkpoint. What it says of a file is the size, the checksum of its header, and where the bytes of each box of
a global tensor lie, with a checksum of their own. Checksums are CRC-32, which no single damaged byte and no
burst of 32 bits escapes; they are no protection against somebody who means harm.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.checkpoint.manifest_schema import schema_error
from plait.errors import CheckpointError
from plait.layout import Box

FILE = "manifest.json"
FORMAT = 1
TAKE_ANOTHER = ": take another checkpoint."
"""How the sentence about a damaged manifest ends."""


@dataclass(frozen=True)
class StoredBox:
    """A box of a global tensor in a file."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """The first byte in the file."""
    checksum: str

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return Box(self.offsets, self.sizes)

    @property
    def key(self) -> str:
        """Its name in the file."""
        return key_of(self.tensor, self.box)


@dataclass(frozen=True)
class FileEntry:
    """A safetensors file of a checkpoint."""

    name: str
    bytes: int
    header: str
    """The checksum of all that stands before the first box."""
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As `str(torch.float32)` without `torch.`."""


@dataclass(frozen=True)
class Manifest:
    """See above."""

    tensors: Mapping[str, TensorEntry]
    """By name: `model.NAME` of a parameter or a buffer, `optim.state.NAME.KEY` of what an optimizer keeps."""
    files: tuple[FileEntry, ...]
    optimizer: Mapping[str, Any] | None = None
    """Class ("": unknown), options of each group, group of each parameter, what is no tensor of its state."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What else a step depends on: see `Engine.run_state`; empty where others wrote the checkpoint."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the user gave to be kept."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """That it was written under; nobody needs it to read the rest."""
    versions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """For each further name that the model has for a parameter, that under which it is here; no `model.`."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


def key_of(tensor: str, box: Box) -> str:
    """The name of a box in a safetensors file: `model.head.weight[0:64,0:32]`."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"{tensor}[{','.join(ranges)}]"


def section(state: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """What plait left in a state, name by name; empty where it left nothing: a state is the user's."""
    found: Any = state
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def manifest_text(manifest: Manifest) -> str:
    """A manifest as text, which `read_manifest` reads."""
    content = json.dumps(_plain(manifest), separators=(",", ":"))
    return f'{{"plait_checkpoint":{FORMAT},"checksum":"{checksum(content.encode())}","content":{content}}}\n'


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. CheckpointError where there is none, or a damaged one."""
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
        known, told = whole["plait_checkpoint"], whole["checksum"]
        content = text[text.index('"content":') + len('"content":') : text.rindex("}")]
        sound = checksum(content.encode()) == told
    except (ValueError, KeyError, TypeError, RecursionError):
        known, sound = FORMAT, False
    if not sound:
        raise CheckpointError(f"{path} is not what was written{TAKE_ANOTHER}", damaged=True)
    if known != FORMAT:
        raise CheckpointError(
            f"{path} has format {known}, and this plait reads {FORMAT}: read it with the plait that wrote it."
        )
    flaw = schema_error(whole["content"])
    if flaw is None:
        flaw = next(
            (link for file in whole["content"]["files"] for link in _outside(folder, file["name"])), None
        )
    if flaw is not None:
        raise CheckpointError(f"{path} is ill formed ({flaw}){TAKE_ANOTHER}", damaged=True)
    return _manifest(whole["content"])


def _outside(folder: Path, name: str) -> Iterator[str]:
    """What is wrong with the name of a file, if it leads out of the folder, by itself or as a link."""
    if not name or Path(name).name != name or "\0" in name:
        yield f"files: it names {name!r}, outside of its folder"
    elif (folder / name).is_symlink() and (folder / name).resolve().parent != folder.resolve():
        yield f"files: {name} is a link that leads out of its folder"


def require_form(manifest: Manifest, where: Path) -> None:
    """CheckpointError where a manifest of what stands at `where` would be ill formed."""
    flaw = schema_error(json.loads(json.dumps(_plain(manifest))))
    if flaw is not None:
        raise CheckpointError(f"{where} cannot be taken over ({flaw}){TAKE_ANOTHER}")


def is_complete(folder: Path) -> bool:
    """Whether a folder has a manifest that is sound; its files may still be damaged."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def checksum(data: bytes | memoryview, before: int = 0) -> str:
    """CRC-32 as eight digits."""
    return f"{zlib.crc32(data, before):08x}"


@dataclass(frozen=True)
class ManifestPart:
    """What one rank says of its part of a checkpoint."""

    tensors: Mapping[str, TensorEntry]
    """Of which it holds pieces, whoever writes them."""
    optimizer: Mapping[str, Any] | None = None
    file: FileEntry | None = None

    def with_file(self, file: FileEntry) -> ManifestPart:
        """The same, with what has been written."""
        return replace(self, file=file)

    def as_text(self) -> str:
        """As `manifest_part_from_text` reads it."""
        assert self.file is not None
        tensors = {name: asdict(one) for name, one in self.tensors.items()}
        told = {"tensors": tensors, "optimizer": self.optimizer, "file": _plain_file(self.file)}
        return json.dumps(told, separators=(",", ":"))


def manifest_part_from_text(text: str) -> ManifestPart:
    """The inverse of `ManifestPart.as_text`."""
    plain = json.loads(text)
    return ManifestPart(_tensors(plain["tensors"]), plain["optimizer"], _file(plain["file"]))


def merged(head: Manifest, shares: Sequence[ManifestPart]) -> Manifest:
    """The manifest of what all ranks have written; `head` has the rest."""
    tensors: dict[str, TensorEntry] = {}
    for share in shares:
        tensors |= share.tensors
    told = [share.optimizer for share in shares if share.optimizer is not None]
    optimizer = _merged_optimizers(told) if told else None
    files = tuple(share.file for share in shares if share.file is not None)
    return replace(head, tensors=tensors, files=files, optimizer=optimizer)


def _merged_optimizers(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks say; groups, which each rank has counted by itself, are those of the same options.

    Groups of one rank stay apart: of several with the same options the first is every rank's first.
    """
    groups: list[Any] = []
    alike: dict[str, list[int]] = {}
    group_of: dict[str, int] = {}
    plain: dict[str, Any] = {}
    for one in told:
        numbers, met = [], dict[str, int]()
        for group in one["groups"]:
            text = json.dumps(group, sort_keys=True)
            before, known = met.get(text, 0), alike.setdefault(text, [])
            met[text] = before + 1
            if before == len(known):
                known.append(len(groups))
                groups.append(group)
            numbers.append(known[before])
        group_of |= {name: numbers[number] for name, number in one["group_of"].items()}
        plain |= one["plain"]
    return {"class": told[0]["class"], "groups": groups, "group_of": group_of, "plain": plain}


_OTHERS = ("optimizer", "run", "state", "plan", "versions", "aliases")


def _plain(manifest: Manifest) -> dict[str, Any]:
    plain = {name: getattr(manifest, name) for name in _OTHERS}
    tensors = {name: asdict(one) for name, one in manifest.tensors.items()}
    return plain | {"tensors": tensors, "files": [_plain_file(file) for file in manifest.files]}


def _plain_file(file: FileEntry) -> dict[str, Any]:
    boxes = [[box.tensor, box.offsets, box.sizes, box.start, box.checksum] for box in file.boxes]
    return {"name": file.name, "bytes": file.bytes, "header": file.header, "boxes": boxes}


def _manifest(plain: Mapping[str, Any]) -> Manifest:
    others = {name: plain[name] for name in _OTHERS if name in plain}
    return Manifest(_tensors(plain["tensors"]), tuple(map(_file, plain["files"])), **others)


def _tensors(plain: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(tuple(one["shape"]), one["dtype"]) for name, one in plain.items()}


def _file(plain: Mapping[str, Any]) -> FileEntry:
    boxes = (
        StoredBox(tensor, tuple(offsets), tuple(sizes), start, told)
        for tensor, offsets, sizes, start, told in plain["boxes"]
    )
    return FileEntry(plain["name"], plain["bytes"], plain["header"], tuple(boxes))
