"""Read the full tensors of a checkpoint one at a time in one process, and write files of full tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.box_reader import BoxReader, open_manifest, require_undamaged
from plait.checkpoint.disk import Disk, write_text
from plait.checkpoint.folders import atomic_folder, resolve
from plait.checkpoint.manifest import FILE, FileEntry, Manifest, manifest_text
from plait.checkpoint.tensor_file import BoxToWrite, portions, write_file
from plait.errors import CheckpointError
from plait.layout import Box
from plait.layout.boxes import full_box

_FILE_ROOM, _ENTRY_ROOM, _DIM_ROOM = 128, 100, 21
"""Most bytes of a header: its frame, a tensor's entry without the name, and each dim of the tensor."""


class FullTensors:
    """The global tensors of a checkpoint, read by name."""

    def __init__(self, path: Path) -> None:
        """Open a checkpoint and check all files; `path` as for `load`. Raises CheckpointError if damaged."""
        self.folder = resolve(path)
        self.manifest = open_manifest(self.folder)
        require_undamaged(self.folder, portions(self.manifest.files))
        self._boxes = BoxReader(self.folder, self.manifest)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved."""
        return self.manifest.tensors[name].torch_dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on the CPU; `dtype` None: as saved. Raises CheckpointError where a part is missing.

        Memory: that tensor; the boxes of the files are memory-mapped.
        """
        return self.read_box(name, full_box(self.manifest.tensors[name].shape), dtype)

    def read_box(self, name: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Return a box of a tensor. Other arguments and errors as for `read`."""
        found = torch.empty(box.sizes, dtype=dtype or self.dtype(name))
        self._boxes.fill_box(found, name, box)
        return found

    def items(self) -> list[BoxToWrite]:
        """Return all tensors, to be written unchanged; tensors without elements have no boxes."""
        return [
            BoxToWrite(name, full_box(one.shape), one.torch_dtype, partial(self.read, name))
            for name, one in self.manifest.tensors.items()
            if prod(one.shape)
        ]


def write_checkpoint(
    target: Path, head: Manifest, items: Sequence[BoxToWrite], *, max_bytes: int | None, disk: Disk
) -> None:
    """Write a checkpoint from one process. `head`: its manifest without files. Raises CheckpointError."""
    with atomic_folder(target, disk) as folder:
        files = write_files(folder, "tensors", items, max_bytes=max_bytes, disk=disk)
        write_text(disk, folder / FILE, manifest_text(replace(head, files=tuple(files))))


def write_files(
    folder: Path, stem: str, items: Sequence[BoxToWrite], *, max_bytes: int | None, disk: Disk
) -> list[FileEntry]:
    """Write `STEM.safetensors`, or `STEM-00001-of-00003.safetensors` …, each of at most `max_bytes`.

    A larger tensor has a file of its own. Raises OSError.
    """
    groups = _groups(items, max_bytes)
    files = []
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        about = {"format": "pt"}  # transformers requires it
        files.append(write_file(folder / f"{stem}{part}.safetensors", group, disk, about))
    return files


def _groups(items: Sequence[BoxToWrite], max_bytes: int | None) -> list[list[BoxToWrite]]:
    """Divide items, in their order, into files of at most `max_bytes`."""
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
