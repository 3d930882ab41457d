"""Reads the metadata of torch.distributed.checkpoint, a pickle, without running code in it.

The unpickler replaces the classes that torch writes by an inert class that only keeps the pickled state, and
refuses all others. The state is validated, and torch's own objects are built from it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from plait.errors import CheckpointError
from plait.layout import Box
from plait.layout.boxes import is_tiling

METADATA = ".metadata"
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


def metadata_of(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint in which all tensors are complete.

    `planner_data` is a dictionary, which may be empty. CheckpointError where the metadata are missing or
    damaged, or name classes that torch does not write.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            pickled = _Unpickler(file, path).load()
        return _metadata(pickled, folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint of torch.distributed.checkpoint, or was never finished: "
            f"it has no {METADATA}."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise damaged(folder, f"{METADATA}: {brief(error)}") from None


def chunk_boxes(entry: TensorStorageMetadata) -> list[Box]:
    """Return the boxes in which a tensor is stored."""
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def brief(error: Exception) -> str:
    """Return type and first line of an error of torch."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0]}".strip()[:_MOST_TOLD]


def damaged(folder: Path, what: str) -> CheckpointError:
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
    """The state of a pickled object, without its behaviour."""

    state: Any = None

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True)
class _FileRange:
    """The bytes of an entry, with the attributes that torch's reader uses."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def _metadata(pickled: object, folder: Path) -> Metadata:
    """Build the metadata from pickled state. Raises any error where the state is not as torch writes it."""
    state = _state(pickled, "Metadata")
    entries = {_text(key): _entry(one) for key, one in state["state_dict_metadata"].items()}
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and not is_tiling(entry.size, chunk_boxes(entry)):
            raise damaged(folder, f"its pieces of {key} do not make up {list(entry.size)}")
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
        raise damaged(folder, f"it has no file {name}")
    if (folder / name).is_symlink() and (folder / name).resolve().parent != folder.resolve():
        raise damaged(folder, f"its file {name} is a link that leads out of it")
    return _FileRange(name, offset, length, tuple(map(_text, state.get("transform_descriptors") or ())))


def _path(key: object, pickled: object) -> tuple[str | int, ...]:
    """Return the path of a key in nested dictionaries and lists."""
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
