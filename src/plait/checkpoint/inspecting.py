"""Summarize a checkpoint: its tensors and files, and whether all are complete and undamaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from plait.checkpoint.folders import resolve
from plait.checkpoint.manifest import FILE, read_manifest
from plait.checkpoint.tensor_file import Portion, find_damage, portions


@dataclass(frozen=True)
class TensorSummary:
    """Shape, dtype and size of one tensor of a checkpoint, and the number of parts it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: int
    bytes: int


@dataclass(frozen=True)
class FileSummary:
    """Name and size of one file of a checkpoint, and the number of boxes stored in it."""

    name: str
    bytes: int
    boxes: int


@dataclass(frozen=True)
class Summary:
    """Summary of a checkpoint: what was saved, in which files, and the damage found."""

    path: str
    state: Mapping[str, Any]
    run: Mapping[str, Any]
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    optimizer: str | None
    """Name of its class."""
    elements: int
    """Number of elements of all parameters and buffers."""
    bytes: int
    """Size of all files."""
    files: tuple[FileSummary, ...]
    tensors: tuple[TensorSummary, ...]
    checked: bool
    """Whether all bytes were checked."""
    flaws: tuple[str, ...]
    """Damaged files, and tensors with missing elements."""


def summary(path: Path, *, check: bool = False) -> Summary:
    """Return a summary of the checkpoint `path`, or of the newest one in that folder.

    Checks the sizes and headers of files; with `check` also the checksums of all bytes. CheckpointError where
    there is no checkpoint.
    """
    folder = path if (path / FILE).is_file() else resolve(path)
    manifest = read_manifest(folder)
    boxes = manifest.boxes_by_tensor()
    elements = {name: sum(box.box.numel for _, box in stored) for name, stored in boxes.items()}
    sizes = {name: prod(one.shape) for name, one in manifest.tensors.items()}
    missing = [
        f"{name} has {elements[name]:,} of its {size:,} elements"
        for name, size in sizes.items()
        if elements[name] != size
    ]
    parts = portions(manifest.files) if check else [Portion(file, ()) for file in manifest.files]
    damages = ((part.file.name, find_damage(folder, part)) for part in parts)
    damaged = (f"{name} {damage}" for name, damage in damages if damage is not None)
    return Summary(
        path=str(folder),
        state=manifest.state,
        run=manifest.run,
        plan=manifest.plan,
        versions=manifest.versions,
        optimizer=None if manifest.optimizer is None else manifest.optimizer["class"],
        elements=sum(prod(one.shape) for one in manifest.parameters.values()),
        bytes=sum(file.bytes for file in manifest.files),
        files=tuple(FileSummary(file.name, file.bytes, len(file.boxes)) for file in manifest.files),
        tensors=tuple(
            TensorSummary(
                name, one.shape, one.dtype, len(boxes[name]), sizes[name] * one.torch_dtype.itemsize
            )
            for name, one in manifest.tensors.items()
        ),
        checked=check,
        flaws=(*dict.fromkeys(damaged), *missing),
    )
