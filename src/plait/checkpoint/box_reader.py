"""Opens a checkpoint, checks it for damage, and reads ranges of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from plait.checkpoint.folders import damaged
from plait.checkpoint.manifest import FILE, READ_WITH_ANOTHER, TAKE_ANOTHER, Manifest, read_manifest
from plait.checkpoint.tensor_file import Portion, TensorFileReader, find_damage
from plait.errors import CheckpointError
from plait.plan.layout.layout import Box, Layout
from plait.plan.layout.shards import intersection, shard_boxes, slices_within


def open_manifest(folder: Path) -> Manifest:
    """Return the manifest in `folder`. CheckpointError, which names the checkpoint before it, if damaged."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        if not error.damaged:
            raise
        reason = str(error).removeprefix(f"{folder / FILE} ")
        reason = reason.removesuffix(TAKE_ANOTHER).removesuffix(READ_WITH_ANOTHER)
        raise damaged(folder, f"{FILE} {reason}") from None


def require_undamaged(folder: Path, portions: Iterable[Portion]) -> None:
    """Raise CheckpointError, which names the previous checkpoint, if a box in `portions` is damaged."""
    for portion in portions:
        damage = find_damage(folder, portion)
        if damage is not None:
            raise damaged(folder, f"{portion.file.name} {damage}")


class BoxReader:
    """Reads tensors of a checkpoint: `fill` a rank's shard, `fill_box` any box (a range per dim)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = TensorFileReader(folder)
        self._folder = folder
        self._tensors = manifest.tensors
        self._stored = manifest.boxes_by_tensor()

    def fill(self, shard: Tensor, name: str, layout: Layout, where: Mapping[str, int]) -> None:
        """Read the shard of tensor `name` that belongs to the rank at mesh coordinate `where` into `shard`.

        Values are converted to the dtype of `shard`, which is contiguous. Memory: a part of one stored box at
        a time. Raises CheckpointError where a file cannot be read or elements are missing.
        """
        for part in shard_boxes(layout, where):
            self.fill_box(part.view_of(shard), name, part.box)

    def fill_box(self, view: Tensor, name: str, box: Box) -> None:
        """Read one box (a range per dim) of tensor `name` into `view`, which has the box's shape."""
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
