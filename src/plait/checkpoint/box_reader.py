"""Reading pieces of global tensors out of a checkpoint, however they were cut when it was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.manifest import Manifest, StoredBox
from plait.checkpoint.tensor_file import TensorFileReader
from plait.errors import CheckpointError
from plait.layout import Box, Layout
from plait.layout.boxes import intersection, piece_boxes, slices_within


class BoxReader:
    """The boxes of a checkpoint, by tensor."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = TensorFileReader(folder)
        self._folder = folder
        self._tensors = manifest.tensors
        self._of: dict[str, list[tuple[str, StoredBox]]] = {}
        for file in manifest.files:
            for box in file.boxes:
                self._of.setdefault(box.tensor, []).append((file.name, box))

    def fill(self, piece: Tensor, name: str, layout: Layout, where: Mapping[str, int]) -> None:
        """Read the piece of a tensor that the rank at a coordinate holds, into contiguous memory.

        A dtype that differs is converted. Beside the piece there is memory for a part of one box at a time.
        CheckpointError where the file cannot be read, or has not all of it.
        """
        for part in piece_boxes(layout, where):
            self.fill_box(part.view_of(piece), name, part.box)

    def fill_box(self, view: Tensor, name: str, box: Box) -> None:
        """Read a box of a tensor into memory of its shape; likewise."""
        found = 0
        for file, stored in self._of.get(name, ()):
            common = intersection(box, stored.box)
            if common.numel:
                saved: torch.dtype = getattr(torch, self._tensors[name].dtype)
                read = self._reader.read(file, stored.key, slices_within(common, stored.box), saved)
                view[slices_within(common, box)].copy_(read)
                found += read.numel()
        if found != view.numel():
            raise CheckpointError(
                f"the checkpoint {self._folder} has {found:,} of the {view.numel():,} elements of {name} "
                "that are needed here: take another checkpoint."
            )
