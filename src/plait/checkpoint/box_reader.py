"""Opens a checkpoint, checks it for damage, and reads ranges of its tensors, however these were sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.folders import previous_checkpoint, resolve
from plait.checkpoint.manifest import (
    FILE,
    READ_WITH_ANOTHER,
    TAKE_ANOTHER,
    Manifest,
    read_manifest,
)
from plait.checkpoint.tensor_file import BoxToWrite, Portion, TensorFileReader, find_damage, portions
from plait.errors import CheckpointError
from plait.plan.layout.boxes import full_box, intersection, piece_boxes, slices_within
from plait.plan.layout.layout import Box, Layout


def open_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. Raises CheckpointError if it is missing or damaged.

    The error for a damaged manifest names the previous checkpoint, if there is one.
    """
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        if not error.damaged:
            raise
        reason = str(error).removeprefix(f"{folder / FILE} ")
        reason = reason.removesuffix(TAKE_ANOTHER).removesuffix(READ_WITH_ANOTHER)
        raise _damaged(folder, f"{FILE} {reason}") from None


def require_undamaged(folder: Path, portions: Iterable[Portion]) -> None:
    """Raise CheckpointError, which names the previous checkpoint, if a box in `portions` is damaged."""
    for portion in portions:
        damage = find_damage(folder, portion)
        if damage is not None:
            raise _damaged(folder, f"{portion.file.name} {damage}")


def _damaged(folder: Path, reason: str) -> CheckpointError:
    previous = previous_checkpoint(folder)
    remedy = f"load {previous}, the one before it" if previous else "take another checkpoint"
    return CheckpointError(f"the checkpoint {folder} is damaged: {reason}: {remedy}.", damaged=True)


class BoxReader:
    """Reads tensors of a checkpoint: `fill` a rank's piece, `fill_box` any box (a range per dim)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = TensorFileReader(folder)
        self._folder = folder
        self._tensors = manifest.tensors
        self._stored = manifest.boxes_by_tensor()

    def fill(self, piece: Tensor, name: str, layout: Layout, where: Mapping[str, int]) -> None:
        """Read the piece of tensor `name` that belongs to the rank at mesh coordinate `where` into `piece`.

        Values are converted to the dtype of `piece`, which is contiguous. Memory: a part of one stored box at
        a time. Raises CheckpointError where a file cannot be read or elements are missing.
        """
        for part in piece_boxes(layout, where):
            self.fill_box(part.view_of(piece), name, part.box)

    def fill_box(self, view: Tensor, name: str, box: Box) -> None:
        """Read one box (a range per dim) of tensor `name` into `view`, of its shape. Errors as for `fill`."""
        found = 0  # elements; stored boxes are disjoint, or `read_manifest` has refused them
        for file, stored in self._stored.get(name, ()):
            common = intersection(box, stored.box)
            if common.numel:
                within = slices_within(common, stored.box)
                entry = stored.entry(self._tensors[name].dtype)
                read = self._reader.read(file, stored.key, within, entry)
                view[slices_within(common, box)].copy_(read)
                found += read.numel()
        if found != view.numel():
            raise CheckpointError(
                f"the checkpoint {self._folder} has {found:,} of the {view.numel():,} elements of {name} "
                "that are needed here: take another checkpoint."
            )


class FullTensors:
    """The global tensors of a checkpoint, read by name."""

    def __init__(self, path: Path) -> None:
        """Open the checkpoint `path`, or the newest in that folder. Raises CheckpointError if damaged."""
        self.folder = resolve(path)
        self.manifest = open_manifest(self.folder)
        require_undamaged(self.folder, portions(self.manifest.files))
        self._boxes = BoxReader(self.folder, self.manifest)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved."""
        return self.manifest.tensors[name].torch_dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a whole tensor on the CPU in `dtype` (None: as saved). Raises CheckpointError if incomplete.

        Memory: that tensor; the boxes of the files are memory-mapped.
        """
        return self.read_box(name, full_box(self.manifest.tensors[name].shape), dtype)

    def read_box(self, name: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Return a box (a range per dim) of a tensor on the CPU. Other arguments and errors as for `read`."""
        found = torch.empty(box.sizes, dtype=dtype or self.dtype(name))
        self._boxes.fill_box(found, name, box)
        return found

    def items(self) -> list[BoxToWrite]:
        """Return a `BoxToWrite` of each non-empty tensor, which is read only when it is written."""
        return [
            BoxToWrite(name, full_box(one.shape), one.torch_dtype, partial(self.read, name))
            for name, one in self.manifest.tensors.items()
            if prod(one.shape)
        ]
