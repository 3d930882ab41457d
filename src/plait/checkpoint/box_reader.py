"""Opens a checkpoint, checks it for damage, and reads any boxes of its tensors, however they were sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from plait.checkpoint.folders import previous_checkpoint
from plait.checkpoint.manifest import FILE, TAKE_ANOTHER, Manifest, StoredBox, read_manifest
from plait.checkpoint.tensor_file import Portion, TensorFileReader, find_damage
from plait.errors import CheckpointError
from plait.layout import Box, Layout
from plait.layout.boxes import intersection, piece_boxes, slices_within


def open_manifest(folder: Path) -> Manifest:
    """Return the manifest in a folder. Raises CheckpointError, which names the previous checkpoint."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        if not error.damaged:
            raise
        reason = str(error).removeprefix(f"{folder / FILE} ").removesuffix(TAKE_ANOTHER)
        raise _damaged(folder, f"{FILE} {reason}") from None


def require_undamaged(folder: Path, portions: Iterable[Portion]) -> None:
    """Raise CheckpointError where bytes of the portions are damaged; names the previous checkpoint."""
    for portion in portions:
        damage = find_damage(folder, portion)
        if damage is not None:
            raise _damaged(folder, f"{portion.file.name} {damage}")


def _damaged(folder: Path, reason: str) -> CheckpointError:
    previous = previous_checkpoint(folder)
    remedy = f"load {previous}, the one before it" if previous else "take another checkpoint"
    return CheckpointError(f"the checkpoint {folder} is damaged: {reason}: {remedy}.", damaged=True)


class BoxReader:
    """Reads pieces and boxes of the tensors of a checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = TensorFileReader(folder)
        self._folder = folder
        self._tensors = manifest.tensors
        self._stored: dict[str, list[tuple[str, StoredBox]]] = {}
        for file in manifest.files:
            for box in file.boxes:
                self._stored.setdefault(box.tensor, []).append((file.name, box))

    def fill(self, piece: Tensor, name: str, layout: Layout, where: Mapping[str, int]) -> None:
        """Read the piece of tensor `name` of the rank at coordinate `where` into the contiguous `piece`.

        Values are converted to the dtype of `piece`. Memory: a part of one stored box at a time.
        Raises CheckpointError where a file cannot be read or elements are missing.
        """
        for part in piece_boxes(layout, where):
            self.fill_box(part.view_of(piece), name, part.box)

    def fill_box(self, view: Tensor, name: str, box: Box) -> None:
        """Read one box of tensor `name` into `view`, which has the shape of the box. Errors as for `fill`."""
        found = 0
        for file, stored in self._stored.get(name, ()):
            common = intersection(box, stored.box)
            if common.numel:
                within = slices_within(common, stored.box)
                read = self._reader.read(file, stored.key, within, self._tensors[name].torch_dtype)
                view[slices_within(common, box)].copy_(read)
                found += read.numel()
        if found != view.numel():
            raise CheckpointError(
                f"the checkpoint {self._folder} has {found:,} of the {view.numel():,} elements of {name} "
                "that are needed here: take another checkpoint."
            )
