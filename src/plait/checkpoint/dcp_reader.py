"""`DcpReader`: reads a checkpoint of torch.distributed.checkpoint without running code in it.

Its metadata are a pickle, which `pickle_reader` reads as names of classes and plain values; classes that
torch does not write are refused. The values are validated, and torch's own objects are built from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from plait.checkpoint.pickle_reader import PickledClass, PickledObject, read_pickle
from plait.errors import CheckpointError
from plait.files import MOST_LEVELS, is_plain_name, is_within, read_bytes, require_file
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import is_tiling

_METADATA = ".metadata"
"""The metadata file, which torch writes last."""
_PATHS = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"})
_KNOWN: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset({
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    }),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "builtins": frozenset({"getattr"}),  # of `_MEM_FORMAT_ENCODING`: enums of Python 3.11.0 to 3.11.3
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}  # fmt: skip
"""The classes that torch's metadata names, by module."""
_MOST_DIMS, _MOST_TRANSFORMS = 64, 16
_MOST_INFLATED = 1000
"""How much longer a chunk of a tensor may be than its bytes in a file that were compressed."""
_MOST_TOLD = 160
"""Characters of torch's error messages that are shown."""


class DcpReader:
    """Reads a checkpoint of torch.distributed.checkpoint. Raises CheckpointError if missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, True)
        self.paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data
        """For each key of a flattened nested dictionary, the keys of its levels."""
        entries = metadata.state_dict_metadata
        self.keys = tuple(entries)
        self.tensors = {key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)}

    def boxes(self, key: str) -> list[Box]:
        """Return the stored chunks of a tensor, each as a box: offset and size per dim."""
        return _chunk_boxes(self.tensors[key])

    def read(self, key: str, box: Box) -> Tensor:
        """Return the stored chunk `box` of a tensor, on the CPU. Raises CheckpointError if it cannot be read.

        Memory: the chunk twice.
        """
        found = self._read(MetadataIndex(key, box.offsets), LoadItemType.TENSOR, box.sizes)
        assert isinstance(found, Tensor)
        return found

    def value(self, key: str) -> Any:
        """Return the number, text, list or tensor at `key`. CheckpointError if damaged or in many chunks."""
        if key not in self.tensors:
            most = self._place(MetadataIndex(key)).length
            found = self._read(MetadataIndex(key), LoadItemType.BYTE_IO, ())
            if not _is_tree(found, most):
                raise _damaged(
                    self.folder, f"{key} cannot be read: it holds itself, or parts of it many times"
                )
            return found
        boxes = self.boxes(key)
        if len(boxes) != 1:
            raise _damaged(self.folder, f"{key} is a tensor in {len(boxes)} boxes")
        return self.read(key, boxes[0])

    def _read(self, index: MetadataIndex, kind: LoadItemType, sizes: tuple[int, ...]) -> object:
        start, dtype = torch.Size([0] * len(sizes)), None
        if kind is LoadItemType.TENSOR:
            dtype = self.tensors[index.fqn].properties.dtype
            self._require_room(index, prod(sizes) * dtype.itemsize)
        planner = _SingleEntryPlanner(dtype)
        item = ReadItem(kind, index, start, index, start, torch.Size(sizes))
        try:
            self._reader.read_data(LoadPlan([item]), planner).wait()
        except Exception as error:  # damaged bytes can make torch raise any error
            raise _damaged(self.folder, f"{index.fqn} cannot be read: {_brief(error)}") from None
        return planner.entry

    def _place(self, index: MetadataIndex) -> _FileRange:
        place = self._reader.storage_data.get(index)
        if not isinstance(place, _FileRange):
            raise _damaged(self.folder, f"{index.fqn} cannot be read: it is in no file")
        return place

    def _require_room(self, index: MetadataIndex, needed: int) -> None:
        """Raise CheckpointError where a file has fewer bytes than a chunk of a tensor needs."""
        place = self._place(index)
        size = (self.folder / place.relative_path).stat().st_size
        held = place.length * (_MOST_INFLATED if place.transform_descriptors else 1)
        if place.offset + place.length > size or needed > held:
            raise _damaged(
                self.folder,
                f"{index.fqn} cannot be read: {place.relative_path} has too few bytes for its {needed:,}",
            )


class _SingleEntryPlanner(DefaultLoadPlanner):
    """Load planner that loads one tensor or object of the checkpoint into its attribute `entry`."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self.entry: object = None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return a new tensor of the entry's shape, into which torch reads the entry."""
        self.entry = memory = torch.empty(read_item.lengths, dtype=self._dtype)
        return memory

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Load the value of an entry that is no tensor, without running pickled code."""
        self.entry = torch.load(value, map_location="cpu", weights_only=True)


class _Reader(FileSystemReader):
    """Torch's `FileSystemReader`, except that reading the metadata runs no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and validate `.metadata` without running code; the chunks of each tensor must cover it."""
        folder = Path(self.path)
        try:
            data = read_bytes(folder / _METADATA)
            pickled = read_pickle(data, lambda module, name: _known(module, name, folder / _METADATA))
            return _metadata(pickled, folder, len(data))
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is no checkpoint of torch.distributed.checkpoint, or was never finished: "
                f"it has no {_METADATA}."
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise any error
            raise _damaged(folder, f"{_METADATA}: {_brief(error)}") from None


def _is_tree(value: object, most: int) -> bool:
    """Return whether a value of dictionaries, lists and tuples has at most `most` parts, and few levels."""
    level, seen = [value], 0
    for _ in range(MOST_LEVELS):
        inner = [one for one in level if isinstance(one, dict | list | tuple)]
        if (seen := seen + sum(map(len, inner))) > most:
            return False
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return not level


def _brief(error: Exception) -> str:
    """Return type and first line of an exception raised by torch, as text."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0]}".strip()[:_MOST_TOLD]


def _damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(
        f"the checkpoint {folder} is damaged ({what}): take another checkpoint.", damaged=True
    )


def _known(module: str, name: str, path: Path) -> object:
    """Return the dtype, layout or `PickledClass` of a name in metadata. CheckpointError for other names."""
    value = vars(torch).get(name) if module == "torch" else None
    if isinstance(value, torch.dtype | torch.layout):
        return value
    module = "builtins" if module == "__builtin__" else module  # as older protocols call it
    if name in _KNOWN.get(module, ()):
        return PickledClass(module, name)
    raise CheckpointError(
        f"{path} names {module}.{name}, which does not belong there and was not run: "
        "do not load this checkpoint with other tools either, unless you trust who wrote it."
    )


@dataclass(frozen=True)
class _FileRange:
    """The range of bytes of an entry in a file; stands in for torch's `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def _metadata(pickled: object, folder: Path, length: int) -> Metadata:
    """Return torch's `Metadata` from the state in a pickle of `length` bytes; bad state raises any error."""
    state = _state(pickled, "Metadata")
    # Each chunk takes some bytes of the pickle, unless a list stands for many.
    chunks = [_state(one, None) for one in state["state_dict_metadata"].values()]
    if sum(len(one["chunks"]) for one in chunks if isinstance(one, dict) and "chunks" in one) > length:
        raise _damaged(folder, "it names more boxes than it can hold")
    entries = {_text(key): _entry(one) for key, one in state["state_dict_metadata"].items()}
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and not is_tiling(entry.size, _chunk_boxes(entry)):
            raise _damaged(folder, f"its boxes of {key} do not make up {list(entry.size)}")
    ranges = {_index(key): _file_range(one, folder) for key, one in state["storage_data"].items()}
    paths = state.get("planner_data")
    paths = {key: _path(key, path) for key, path in paths.items()} if isinstance(paths, dict) else {}
    return Metadata(entries, planner_data=paths, storage_data=ranges)


def _entry(pickled: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(pickled, PickledObject) and pickled.kind.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(pickled, "TensorStorageMetadata")
    dtype = _state(state["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no dtype")
    chunks = (_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"])
    return TensorStorageMetadata(
        TensorProperties(dtype),
        _size(state["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(pickled: object) -> MetadataIndex:
    state = _state(pickled, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))


def _file_range(pickled: object, folder: Path) -> _FileRange:
    state = _state(pickled, "_StorageInfo")
    name, (offset, length) = _text(state["relative_path"]), _size((state["offset"], state["length"]))
    if not is_plain_name(name) or not (folder / name).exists():
        raise _damaged(folder, f"it has no file {name}")
    if not is_within(folder, name):
        raise _damaged(folder, f"its file {name} is a link that leads out of it")
    require_file(folder / name)
    transforms = tuple(map(_text, state.get("transform_descriptors") or ()))
    if len(transforms) > _MOST_TRANSFORMS:
        raise ValueError(f"{len(transforms)} transforms of one entry")
    return _FileRange(name, offset, length, transforms)


def _path(key: object, pickled: object) -> tuple[str | int, ...]:
    """Return `pickled` as a path of nested keys. Raises TypeError or ValueError unless it spells `key`."""
    if not isinstance(pickled, tuple | list) or not all(isinstance(part, str | int) for part in pickled):
        raise TypeError(f"the path of {_text(key)} is no path")
    if len(pickled) > len(_text(key)) + 1 or ".".join(map(str, pickled)) != key:
        raise ValueError(f"another path is not that of {key}")
    return tuple(pickled)


def _state(pickled: object, kind: str | None) -> Any:
    """Return the state of a pickled object, of the class `kind`, if given."""
    if not isinstance(pickled, PickledObject) or kind not in (None, pickled.kind.name):
        raise TypeError(f"a {type(pickled).__name__} stands for a {kind}")
    return pickled.state


def _size(pickled: object) -> torch.Size:
    if isinstance(pickled, PickledObject) and pickled.kind == PickledClass("torch", "Size"):
        (pickled,) = pickled.arguments
    if not isinstance(pickled, tuple) or len(pickled) > _MOST_DIMS:
        raise TypeError("a size is none")
    if not all(type(size) is int and 0 <= size < 2**63 for size in pickled):
        raise ValueError("a size is out of range")
    return torch.Size(pickled)


def _text(pickled: object) -> str:
    if not isinstance(pickled, str):
        raise TypeError(f"a {type(pickled).__name__} stands for a text")
    return pickled


def _chunk_boxes(entry: TensorStorageMetadata) -> list[Box]:
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
