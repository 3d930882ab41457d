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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from plait.errors import CheckpointError
from plait.files import first_fault, is_plain_name, is_within, json_value, read_text, require_levels
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import overlap

FILE = "manifest.json"
FORMAT = 1
TAKE_ANOTHER = ": take another checkpoint."
"""The end of error messages about a damaged manifest."""
READ_WITH_ANOTHER = ": read it with the plait that wrote it."
"""The end of the message about a manifest of another format."""
Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
"""Names of the dtypes that a file can hold, those of `tensor_file.DTYPES`."""
Plain = dict[StrictStr, Any]
_MOST_ELEMENTS = 2**62


class StoredBox(NamedTuple):
    """A box (offset and size per dim) of a global tensor, as stored in a file."""

    tensor: str
    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]
    start: Size
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

    def entry(self, dtype: Dtype) -> TensorEntry:
        """Return the shape and dtype of the safetensors entry that stores this box of a tensor of `dtype`."""
        return TensorEntry(self.sizes, dtype)


@dataclass(frozen=True)
class FileEntry:
    """Entry of a manifest: a safetensors file of the checkpoint."""

    name: str
    bytes: Size
    header: str
    """The checksum of the bytes before the first box."""
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Entry of a manifest: shape and dtype of a global tensor of the checkpoint."""

    shape: tuple[Size, ...]
    dtype: Dtype

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> TensorEntry:
        """Return the entry of a tensor of this shape and dtype."""
        return cls(tuple(shape), cast(Dtype, str(dtype).removeprefix("torch.")))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a `torch.dtype`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest: tensors, files, state of the run, and versions of software."""

    tensors: Mapping[str, TensorEntry]
    """By key: `model.NAME` of a parameter or buffer, `optim.state.NAME.KEY` of optimizer state."""
    files: tuple[FileEntry, ...]
    optimizer: Mapping[str, Any] | None = None
    """Class ("": unknown), options of each group, group of each parameter, state that is no tensor."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Further state on which steps depend, such as the number of passes; empty in an imported checkpoint."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The user's own state."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan under which the checkpoint was saved, for information."""
    versions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """For each further name of a shared parameter, the name under which it is saved, without `model.`."""

    @property
    def parameters(self) -> dict[str, TensorEntry]:
        """Parameters and buffers by name, without `model.`."""
        found = self.tensors.items()
        return {key.removeprefix("model."): one for key, one in found if key.startswith("model.")}

    def boxes_by_tensor(self) -> dict[str, list[tuple[str, StoredBox]]]:
        """Return each tensor's stored boxes, with their files' names; none of a tensor without elements.

        Of several that are the same box, as in files from several hosts' memory, the first.
        """
        boxes: dict[str, dict[Box, tuple[str, StoredBox]]] = {name: {} for name in self.tensors}
        for file in self.files:
            for box in file.boxes:
                boxes[box.tensor].setdefault(box.box, (file.name, box))
        return {name: list(found.values()) for name, found in boxes.items()}


def key_of(tensor: str, box: Box) -> str:
    """Return the name of a box in a safetensors file, such as `model.head.weight[0:64,0:32]`."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"{tensor}[{','.join(ranges)}]"


def section(state: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the mapping at the nested keys `names` of a user's state; {} if there is none."""
    found: Any = state
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest file, which `read_manifest` reads."""
    content = json.dumps(manifest, default=vars, separators=(",", ":"))
    return f'{{"plait_checkpoint":{FORMAT},"checksum":"{checksum(content.encode())}","content":{content}}}\n'


def read_manifest(folder: Path, name: str = FILE) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. Raises CheckpointError if missing or damaged."""
    path = folder / name
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint, or was never finished: it has no {name}."
        ) from None
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        raise CheckpointError(f"{path} {reason}{TAKE_ANOTHER}", damaged=True) from None
    except ValueError:
        text = ""
    try:
        whole = json_value(text, strict=False)
        version = whole["plait_checkpoint"]
        content = text[text.index('"content":') + len('"content":') : text.rindex("}")]
        is_intact = checksum(content.encode()) == whole["checksum"] and type(version) is int
    except (ValueError, KeyError, TypeError):
        version, is_intact = FORMAT, False
    if not is_intact:
        raise CheckpointError(f"{path} is not what was written{TAKE_ANOTHER}", damaged=True)
    if version != FORMAT:  # the version of a later plait, or a damaged digit
        raise CheckpointError(
            f"{path} has format {version}, and this plait reads {FORMAT}{READ_WITH_ANOTHER}", damaged=True
        )
    try:
        manifest = _parse(whole["content"])
        for file in manifest.files:
            _require_inside(folder, file.name)
    except ValueError as error:
        raise CheckpointError(f"{path} is ill formed ({error}){TAKE_ANOTHER}", damaged=True) from None
    return manifest


def _require_inside(folder: Path, name: str) -> None:
    """Raise ValueError for a file name that is, or links to, a path outside of the folder."""
    if not is_plain_name(name):
        raise ValueError(f"files: it names {name!r}, outside of its folder")
    if not is_within(folder, name):
        raise ValueError(f"files: {name} is a link that leads out of its folder")


def require_form(manifest: Manifest, where: Path) -> None:
    """Raise CheckpointError where a manifest, made from the foreign checkpoint `where`, breaks the schema."""
    try:
        _parse(json.loads(json.dumps(manifest, default=vars)))
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be taken over ({error}){TAKE_ANOTHER}") from None


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


_OTHERS = ("optimizer", "run", "state", "plan", "versions", "aliases")


class _Form(BaseModel):
    model_config = ConfigDict(extra="ignore")  # for keys that a later version adds


class _Optimizer(_Form):
    kind: StrictStr = Field(alias="class")
    groups: list[Plain]
    group_of: dict[StrictStr, Size]
    plain: dict[StrictStr, Plain]
    class_of: dict[StrictStr, StrictStr] = Field(default_factory=dict)


class _LossScale(_Form):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
    good_steps: Size


class _Order(_Form):
    microbatches: Size
    rank_of: list[Size]
    order: StrictStr


class _Run(_Form):
    passes: Size
    loss_scale: _LossScale | None
    order: _Order | None = None


class _Content(_Form):
    tensors: dict[StrictStr, TensorEntry]
    files: list[FileEntry]
    optimizer: _Optimizer | None = None
    run: _Run | Annotated[dict[StrictStr, Any], Field(max_length=0)] = Field(default_factory=dict)
    state: Plain = Field(default_factory=dict)
    plan: Plain = Field(default_factory=dict)
    versions: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    aliases: dict[StrictStr, StrictStr] = Field(default_factory=dict)


def _parse(content: object) -> Manifest:
    """Return the manifest with this JSON content. Raises ValueError, with the first error as "KEY: …".

    A valid checksum does not make a manifest well formed; all code that reads checkpoints relies on these
    checks.
    """
    require_levels(content)
    try:
        found = _Content.model_validate(content)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    for problem in _inconsistencies(found):
        raise ValueError(problem)
    assert isinstance(content, dict)
    others = {name: content[name] for name in _OTHERS if name in content}  # with keys of a later plait
    return Manifest(found.tensors, tuple(found.files), **others)


def _inconsistencies(found: _Content) -> Iterator[str]:
    """Yield the contradictions between parts of a manifest that are valid by themselves."""
    for name, one in found.tensors.items():
        if prod(one.shape) >= _MOST_ELEMENTS:
            yield f"tensors.{name}: {list(one.shape)} is larger than any memory"
    for name, count in Counter(file.name for file in found.files).items():
        if count > 1:
            yield f"files: {name!r} is listed several times"
    for file in found.files:
        yield from _box_errors(file, found.tensors)
    yield from _overlaps(found)
    if found.optimizer is not None:
        for name, group in found.optimizer.group_of.items():
            if group >= len(found.optimizer.groups):
                yield f"optimizer.group_of.{name}: there is no group {group}"
    for alias, name in found.aliases.items():
        if f"model.{name}" not in found.tensors:
            yield f"aliases.{alias}: there is no tensor {name}"


def _overlaps(found: _Content) -> Iterator[str]:
    """Yield tensors of which a part is stored twice: such parts would count for others that are missing."""
    boxes: dict[str, list[Box]] = {}
    for file in found.files:
        for one in file.boxes:
            boxes.setdefault(one.tensor, []).append(one.box)
    for tensor, stored in boxes.items():
        if (pair := overlap(stored)) is not None:
            yield f"files: {key_of(tensor, pair[0])} and {key_of(tensor, pair[1])} overlap"


def _box_errors(file: FileEntry, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    end = 0
    for tensor, offsets, sizes, start, _ in file.boxes:
        known = tensors.get(tensor)
        if known is None:
            yield f"files.{file.name}: it has a box of {tensor}, which is no tensor of the checkpoint"
        elif not len(known.shape) == len(offsets) == len(sizes) or any(
            offset + size > most for offset, size, most in zip(offsets, sizes, known.shape, strict=True)
        ):
            yield f"files.{file.name}: it has a box of {tensor} at {list(offsets)} that is outside of it"
        if not end <= start <= file.bytes:
            yield f"files.{file.name}: its box of {tensor} begins at byte {start}, out of order"
        end = start
