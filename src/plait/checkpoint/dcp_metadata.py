"""The metadata of torch.distributed.checkpoint, read without running anything that stands in them.

They are a pickle. Of the classes in it only names are taken, and only those that torch writes; what they
would have been is told by objects of one harmless class, looked over, and said anew in torch's own words.
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
"""The file that says what is where; torch writes it last."""
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
"""What a pickle of torch's names, by module."""
_MOST_TOLD = 160
"""Characters of an error of torch's."""


def metadata_of(folder: Path) -> Metadata:
    """What is in a checkpoint, and where; every tensor is all there.

    `planner_data` is a dictionary, if an empty one. CheckpointError where there are no metadata, where they
    name what torch does not write, and where they are damaged.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            told = _Unpickler(file, path).load()
        return _metadata(told, folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint of torch.distributed.checkpoint, or was never finished: "
            f"it has no {METADATA}."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a pickle that was cut off, or changed, fails in any way
        raise damaged(folder, f"{METADATA}: {brief(error)}") from None


def chunk_boxes(entry: TensorStorageMetadata) -> list[Box]:
    """In which a tensor is stored."""
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def brief(error: Exception) -> str:
    """An error of torch's, in a few words."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0]}".strip()[:_MOST_TOLD]


def damaged(folder: Path, what: str) -> CheckpointError:
    """To be raised where a checkpoint is not as it was written."""
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
            return type(name, (_Told,), {})
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which does not belong there and was not run: "
            "do not load this checkpoint with other tools either, unless you trust who wrote it."
        )


class _Told:
    """What a pickle says of an object: the state that it had, and nothing of what it could do."""

    state: Any = None

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True)
class _Place:
    """Where the bytes of an entry are, in the words in which torch's reader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def _metadata(told: object, folder: Path) -> Metadata:
    """The metadata, of objects that are known to be what they should be. Any error: they are not."""
    state = _state(told, "Metadata")
    entries = {_text(key): _entry(one) for key, one in state["state_dict_metadata"].items()}
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and not is_tiling(entry.size, chunk_boxes(entry)):
            raise damaged(folder, f"its pieces of {key} do not make up {list(entry.size)}")
    places = {_index(key): _place(one, folder) for key, one in state["storage_data"].items()}
    paths = state.get("planner_data")
    paths = {key: _path(key, path) for key, path in paths.items()} if isinstance(paths, dict) else {}
    return Metadata(entries, planner_data=paths, storage_data=places)


def _entry(told: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(told).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(told, "TensorStorageMetadata")
    dtype = _state(state["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is no dtype")
    chunks = (_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"])
    return TensorStorageMetadata(
        TensorProperties(dtype),
        _size(state["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(told: object) -> MetadataIndex:
    state = _state(told, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))


def _place(told: object, folder: Path) -> _Place:
    state = _state(told, "_StorageInfo")
    name, (offset, length) = _text(state["relative_path"]), _size((state["offset"], state["length"]))
    if Path(name).name != name or not (folder / name).is_file():
        raise damaged(folder, f"it has no file {name}")
    if (folder / name).is_symlink() and (folder / name).resolve().parent != folder.resolve():
        raise damaged(folder, f"its file {name} is a link that leads out of it")
    return _Place(name, offset, length, tuple(map(_text, state.get("transform_descriptors") or ())))


def _path(key: object, told: object) -> tuple[str | int, ...]:
    """The keys of nested dictionaries, and places in lists, which make up a key."""
    if not isinstance(told, tuple | list) or not all(isinstance(part, str | int) for part in told):
        raise TypeError(f"{told} is no path")
    if ".".join(map(str, told)) != key:
        raise ValueError(f"the path {told} is not that of {key}")
    return tuple(told)


def _state(told: object, kind: str) -> Any:
    if type(told).__name__ != kind or not isinstance(told, _Told):
        raise TypeError(f"a {type(told).__name__} stands for a {kind}")
    return told.state


def _size(told: object) -> torch.Size:
    if not isinstance(told, tuple) or not all(type(size) is int and size >= 0 for size in told):
        raise TypeError(f"{told} is no size")
    return torch.Size(told)


def _text(told: object) -> str:
    if not isinstance(told, str):
        raise TypeError(f"{told} is no text")
    return told
