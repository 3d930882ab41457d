"""`DcpReader`: reads a checkpoint of torch.distributed.checkpoint without running code in it.

Its metadata are a pickle. The unpickler replaces the classes that torch writes by an inert class that only
keeps the pickled state, and refuses all others. The state is validated, and torch's own objects are built
from it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

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

from plait.errors import CheckpointError
from plait.layout import Box
from plait.layout.boxes import is_tiling

_METADATA = ".metadata"
"""The metadata file, which torch writes last."""
_PATHS = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"})
_KNOWN: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""The classes that torch's metadata names, by module."""
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
            return self._read(MetadataIndex(key), LoadItemType.BYTE_IO, ())
        boxes = self.boxes(key)
        if len(boxes) != 1:
            raise _damaged(self.folder, f"{key} is a tensor in {len(boxes)} pieces")
        return self.read(key, boxes[0])

    def _read(self, index: MetadataIndex, kind: LoadItemType, sizes: tuple[int, ...]) -> object:
        start, dtype = torch.Size([0] * len(sizes)), None
        if kind is LoadItemType.TENSOR:
            dtype = self.tensors[index.fqn].properties.dtype
        planner = _SingleEntryPlanner(dtype)
        item = ReadItem(kind, index, start, index, start, torch.Size(sizes))
        try:
            self._reader.read_data(LoadPlan([item]), planner).wait()
        except Exception as error:  # damaged bytes can make torch raise any error
            raise _damaged(self.folder, f"{index.fqn} cannot be read: {_brief(error)}") from None
        return planner.entry


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
        """Read and validate `.metadata` without running code; the chunks of each tensor must cover it.

        `planner_data` is a dictionary, which may be empty. CheckpointError where the metadata are missing or
        damaged, or name classes that torch does not write.
        """
        folder = Path(self.path)
        try:
            with (folder / _METADATA).open("rb") as file:
                pickled = _Unpickler(file, folder / _METADATA).load()
            return _metadata(pickled, folder)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is no checkpoint of torch.distributed.checkpoint, or was never finished: "
                f"it has no {_METADATA}."
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise any error
            raise _damaged(folder, f"{_METADATA}: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    """Return type and first line of an exception raised by torch, as text."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0]}".strip()[:_MOST_TOLD]


def _damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(
        f"the checkpoint {folder} is damaged ({what}): take another checkpoint.", damaged=True
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout):
            return value
        if name in _KNOWN.get(module, ()):
            return type(name, (_Pickled,), {})
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which does not belong there and was not run: "
            "do not load this checkpoint with other tools either, unless you trust who wrote it."
        )


class _Pickled:
    """Stand-in for a pickled object: its state, without its class or behaviour."""

    state: Any = None

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True)
class _FileRange:
    """The range of bytes of an entry in a file; stands in for torch's `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def _metadata(pickled: object, folder: Path) -> Metadata:
    """Build torch's `Metadata` from unpickled state; malformed state raises an exception of any type."""
    state = _state(pickled, "Metadata")
    entries = {_text(key): _entry(one) for key, one in state["state_dict_metadata"].items()}
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and not is_tiling(entry.size, _chunk_boxes(entry)):
            raise _damaged(folder, f"its pieces of {key} do not make up {list(entry.size)}")
    ranges = {_index(key): _file_range(one, folder) for key, one in state["storage_data"].items()}
    paths = state.get("planner_data")
    paths = {key: _path(key, path) for key, path in paths.items()} if isinstance(paths, dict) else {}
    return Metadata(entries, planner_data=paths, storage_data=ranges)


def _entry(pickled: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(pickled).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(pickled, "TensorStorageMetadata")
    dtype = _state(state["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is no dtype")
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
    if Path(name).name != name or not (folder / name).is_file():
        raise _damaged(folder, f"it has no file {name}")
    if (folder / name).is_symlink() and (folder / name).resolve().parent != folder.resolve():
        raise _damaged(folder, f"its file {name} is a link that leads out of it")
    return _FileRange(name, offset, length, tuple(map(_text, state.get("transform_descriptors") or ())))


def _path(key: object, pickled: object) -> tuple[str | int, ...]:
    """Return `pickled` as a path of nested keys. Raises TypeError or ValueError unless it spells `key`."""
    if not isinstance(pickled, tuple | list) or not all(isinstance(part, str | int) for part in pickled):
        raise TypeError(f"{pickled} is no path")
    if ".".join(map(str, pickled)) != key:
        raise ValueError(f"the path {pickled} is not that of {key}")
    return tuple(pickled)


def _state(pickled: object, kind: str) -> Any:
    if type(pickled).__name__ != kind or not isinstance(pickled, _Pickled):
        raise TypeError(f"a {type(pickled).__name__} stands for a {kind}")
    return pickled.state


def _size(pickled: object) -> torch.Size:
    if not isinstance(pickled, tuple) or not all(type(size) is int and size >= 0 for size in pickled):
        raise TypeError(f"{pickled} is no size")
    return torch.Size(pickled)


def _text(pickled: object) -> str:
    if not isinstance(pickled, str):
        raise TypeError(f"{pickled} is no text")
    return pickled


def _chunk_boxes(entry: TensorStorageMetadata) -> list[Box]:
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
