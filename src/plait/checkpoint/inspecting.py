"""What is in a checkpoint, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.folders import resolve
from plait.checkpoint.manifest import FILE, FileEntry, Manifest, StoredBox, read_manifest
from plait.checkpoint.tensor_file import damage, portions


@dataclass(frozen=True)
class TensorSummary:
    """A global tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: int
    bytes: int


@dataclass(frozen=True)
class FileSummary:
    """A file."""

    name: str
    bytes: int
    boxes: int


@dataclass(frozen=True)
class Summary:
    """A checkpoint."""

    path: str
    state: Mapping[str, Any]
    run: Mapping[str, Any]
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    optimizer: str | None
    """Its class."""
    elements: int
    """Of all parameters and buffers."""
    bytes: int
    """Of all files."""
    files: tuple[FileSummary, ...]
    tensors: tuple[TensorSummary, ...]
    checked: bool
    """Whether every byte was read."""
    flaws: tuple[str, ...]
    """What is damaged or missing."""


def summary(path: Path, *, check: bool = False) -> Summary:
    """What is in the checkpoint `path`, or in the newest one in that folder.

    Files are looked at by their size; with `check` all bytes are read and compared with what was written.
    CheckpointError where there is no checkpoint.
    """
    folder = path if (path / FILE).is_file() else resolve(path)
    manifest = read_manifest(folder)
    of: dict[str, list[StoredBox]] = {}
    for file in manifest.files:
        for box in file.boxes:
            of.setdefault(box.tensor, []).append(box)
    tensors = tuple(
        TensorSummary(name, one.shape, one.dtype, len(of.get(name, ())), _bytes(one.shape, one.dtype))
        for name, one in manifest.tensors.items()
    )
    return Summary(
        path=str(folder),
        state=manifest.state,
        run=manifest.run,
        plan=manifest.plan,
        versions=manifest.versions,
        optimizer=None if manifest.optimizer is None else manifest.optimizer["class"],
        elements=sum(prod(one.shape) for one in tensors if one.name.startswith("model.")),
        bytes=manifest.bytes,
        files=tuple(FileSummary(file.name, file.bytes, len(file.boxes)) for file in manifest.files),
        tensors=tensors,
        checked=check,
        flaws=(*_damaged(folder, manifest, check=check), *_lacking(tensors, of)),
    )


def _damaged(folder: Path, manifest: Manifest, *, check: bool) -> list[str]:
    if check:
        looked_at = ((one.file, damage(folder, one)) for one in portions(manifest.files))
    else:
        looked_at = ((file, _wrong_size(folder, file)) for file in manifest.files)
    return list(dict.fromkeys(f"{file.name} {flaw}" for file, flaw in looked_at if flaw is not None))


def _wrong_size(folder: Path, file: FileEntry) -> str | None:
    try:
        size = (folder / file.name).stat().st_size
    except OSError:
        return "is missing"
    return None if size == file.bytes else f"has {size:,} bytes and not {file.bytes:,}"


def _lacking(tensors: tuple[TensorSummary, ...], of: Mapping[str, list[StoredBox]]) -> list[str]:
    """Tensors of which the files have not all elements."""
    flaws = []
    for one in tensors:
        there = sum(prod(box.sizes) for box in of.get(one.name, ()))
        if there != prod(one.shape):
            flaws.append(f"{one.name} has {there:,} of its {prod(one.shape):,} elements")
    return flaws


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return prod(shape) * kind.itemsize
