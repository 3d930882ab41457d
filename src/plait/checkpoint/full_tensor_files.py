"""The global tensors of a checkpoint, each whole, one at a time; and files of such tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.box_reader import BoxReader
from plait.checkpoint.disk import Disk, write_text
from plait.checkpoint.folders import atomic_folder, resolve
from plait.checkpoint.loading import open_manifest, require_undamaged
from plait.checkpoint.manifest import FILE, FileEntry, Manifest, manifest_text
from plait.checkpoint.tensor_file import BoxToWrite, portions, write_file
from plait.errors import CheckpointError
from plait.layout import Box

_FILE_ROOM, _ENTRY_ROOM, _DIM_ROOM = 128, 100, 21
"""Bytes that a header takes at most: by itself, for a tensor beside its name, and for each of its dims."""


class FullTensors:
    """The tensors of a checkpoint whose files have been looked through."""

    def __init__(self, path: Path) -> None:
        """`path`: as for `load`. Reads every byte once. CheckpointError where it is damaged, or not there."""
        self.folder = resolve(path)
        self.manifest = open_manifest(self.folder)
        require_undamaged(self.folder, portions(self.manifest.files))
        self._boxes = BoxReader(self.folder, self.manifest)

    def dtype(self, name: str) -> torch.dtype:
        """That it was saved in."""
        found: torch.dtype = getattr(torch, self.manifest.tensors[name].dtype)
        return found

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the CPU, as it was saved or in another dtype. CheckpointError where a part is missing.

        Memory: that tensor, as read from boxes that are mapped into memory.
        """
        return self.read_box(name, full_box(self.manifest.tensors[name].shape), dtype)

    def read_box(self, name: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """A box of a tensor; likewise."""
        found = torch.empty(box.sizes, dtype=dtype or self.dtype(name))
        self._boxes.fill_box(found, name, box)
        return found

    def items(self) -> list[BoxToWrite]:
        """All of them, to be written as they are; none of those without elements, which have no boxes."""
        return [
            BoxToWrite(name, full_box(one.shape), self.dtype(name), partial(self.read, name))
            for name, one in self.manifest.tensors.items()
            if prod(one.shape)
        ]


def full_box(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def write_checkpoint(
    target: Path, head: Manifest, items: Sequence[BoxToWrite], *, max_bytes: int | None, disk: Disk
) -> None:
    """Write a checkpoint of one process. `head`: its manifest, but for the files. CheckpointError."""
    with atomic_folder(target, disk) as folder:
        files = write_files(folder, "tensors", items, max_bytes=max_bytes, disk=disk)
        write_text(disk, folder / FILE, manifest_text(replace(head, files=tuple(files))))


def write_files(
    folder: Path, stem: str, items: Sequence[BoxToWrite], *, max_bytes: int | None, disk: Disk
) -> list[FileEntry]:
    """Write `STEM.safetensors`, or `STEM-00001-of-00003.safetensors` …, each of at most `max_bytes`.

    A tensor that is larger has a file of its own. Raises OSError.
    """
    groups = _groups(items, max_bytes)
    files = []
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        about = {"format": "pt"}  # what transformers asks for
        files.append(write_file(folder / f"{stem}{part}.safetensors", group, disk, about))
    return files


def _groups(items: Sequence[BoxToWrite], max_bytes: int | None) -> list[list[BoxToWrite]]:
    """Items in their order, as many in a file as there is room for."""
    if max_bytes is None:
        return [list(items)]
    if max_bytes < 1:
        raise CheckpointError(f"files of at most {max_bytes} bytes hold nothing: give a larger size.")
    groups: list[list[BoxToWrite]] = [[]]
    room = max_bytes - _FILE_ROOM
    for item in items:
        takes = item.bytes + len(json.dumps(item.key)) + _ENTRY_ROOM + _DIM_ROOM * len(item.box.sizes)
        if groups[-1] and takes > room:
            groups.append([])
            room = max_bytes - _FILE_ROOM
        groups[-1].append(item)
        room -= takes
    return groups
