"""`SnapshotBuffer`: two files of one rank in a `SnapshotFolder`: one is complete while the other is written.

    withdraw   remove the manifest of the half that is written next: it is incomplete from now on
    copy       the header, then each box
    commit     compute the checksums of the copies, then publish the manifest, which appears at once

A half is complete, of this rank, where its manifest is there. So whenever the rank is killed, the half that
was complete before is still so; where it is not, the other one is.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.manifest import Manifest, manifest_text
from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.rank_contents import Checkpointable, parameter_key
from plait.checkpoint.save_task import file_name
from plait.checkpoint.saving import LocalBox, contents_to_write, manifest_head
from plait.checkpoint.snapshots.snapshot_folder import SnapshotFolder
from plait.checkpoint.tensor_file import FileLayout, chunks_of
from plait.ranks.device import StreamEvent, copy_later, is_accelerator


@dataclass(frozen=True)
class RankContents:
    """What a rank writes of one snapshot."""

    boxes: Sequence[LocalBox]
    layout: FileLayout
    manifest: Manifest
    """That of the rank's part, without its file."""

    @staticmethod
    def of(
        engine: Checkpointable,
        optimizers: OptimizerSet | None,
        writers: Collection[int],
        state: Mapping[str, Any],
    ) -> RankContents:
        """Return what this rank writes, if `writers` write all that they hold together, each box once."""
        head = manifest_head(engine, state)
        part, boxes = contents_to_write(engine, optimizers, writers)
        aliases = {alias: name for alias, name in head.aliases.items() if parameter_key(name) in part.tensors}
        manifest = replace(head, tensors=part.tensors, optimizer=part.optimizer, aliases=aliases)
        return RankContents(boxes, FileLayout.of([item for item, _ in boxes]), manifest)


class SnapshotBuffer:
    """Writes one rank's part of snapshots into the halves of a double buffer."""

    def __init__(self, folder: SnapshotFolder, rank: int) -> None:
        self._folder, self._file, self._manifest = folder, file_name(rank), manifest_name(rank)
        self._memory: dict[int, Tensor] = {}
        self._copies: list[Tensor] = []
        self._copied: list[StreamEvent] = []
        self.bytes_copied = 0
        """The bytes of all boxes that were copied into either half."""

    def reserve(self, half: int, size: int) -> None:
        """Reserve `size` bytes for the half that is written next, and for the other one where it has none.

        Raises CheckpointError where there is no room for them.
        """
        wanted = [half] if half not in self._memory or self._memory[half].nbytes != size else []
        other = 1 - half
        has_file = (self._folder.half(other) / self._file).exists()
        if (
            other not in self._memory and not has_file
        ):  # a file may be what an earlier process is restored from
            wanted.append(other)
        try:
            for number in wanted:
                self._memory.pop(number, None)
                self._memory[number] = self._folder.mapped(number, self._file, size)
        except OSError as error:
            raise self._folder.no_room(error, size) from None

    def copy(self, half: int, contents: RankContents) -> None:
        """Start to copy into a half, which is no complete snapshot from now on.

        Raises CheckpointError, OSError.
        """
        self._folder.withdraw(half, self._manifest)
        layout = contents.layout
        self.reserve(half, layout.bytes)
        memory, views = self._memory[half], {id(item): view for item, view in contents.boxes}
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        memory[: len(header)].copy_(header)
        self._copies = []
        for item, start in zip(layout.items, layout.starts, strict=True):
            view = views[id(item)]
            self._copies.append(memory[start : start + item.bytes].view(view.dtype).view(view.shape))
            copy_later(self._copies[-1], view)
            self.bytes_copied += item.bytes
        devices = {view.device for view in views.values() if is_accelerator(view)}
        self._copied = [StreamEvent(device) for device in devices]

    def commit(self, half: int, contents: RankContents) -> None:
        """Wait for the copies, and publish the manifest of this rank's part; any thread may call it.

        Raises OSError.
        """
        for event in self._copied:
            event.wait()
        checksums = [_checksum(copy) for copy in self._copies]
        manifest = replace(contents.manifest, files=(contents.layout.entry(self._file, checksums),))
        self._folder.publish(half, self._manifest, manifest_text(manifest))


def manifest_name(rank: int) -> str:
    """Return the name of the manifest of a rank's part of a snapshot."""
    return f"rank-{rank:05d}.json"


def _checksum(copy: Tensor) -> str:
    crc = 0
    for chunk in chunks_of(copy):
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"
