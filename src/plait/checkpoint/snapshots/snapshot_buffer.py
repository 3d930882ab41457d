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

from plait.checkpoint.manifest import Manifest, TensorEntry, manifest_text
from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.optimizer_state import describe
from plait.checkpoint.rank_contents import Checkpointable, parameter_key
from plait.checkpoint.save_task import ManifestPart, file_name
from plait.checkpoint.saving import LocalBox, contents_to_write, manifest_head
from plait.checkpoint.snapshots.snapshot_folder import SnapshotFolder
from plait.checkpoint.tensor_file import CHUNK, FileLayout
from plait.ranks.accelerator import StreamEvent, copy_later, is_accelerator

Addresses = list[tuple[str, int, torch.dtype, tuple[int, ...]]]
"""Name, address, dtype and shape of each tensor that a rank holds."""


@dataclass(frozen=True)
class RankContents:
    """The tensors that one rank writes into a snapshot, and the manifest that describes them."""

    boxes: Sequence[LocalBox]
    layout: FileLayout
    tensors: Mapping[str, TensorEntry]
    """All tensors of which the rank holds a shard."""
    addresses: Addresses
    """Where the tensors are; empty where some are copied in order to be written."""
    manifest: Manifest
    """That of the rank's part, without its file."""

    @staticmethod
    def of(
        engine: Checkpointable,
        optimizers: OptimizerSet | None,
        writers: Collection[int],
        state: Mapping[str, Any],
        last: RankContents | None,
    ) -> RankContents:
        """Return the boxes that this rank writes, and their manifest; one of the `writers` writes each box.

        `writers`: the ranks that together write all that they hold. Boxes of the `last` snapshot are taken
        again where all tensors are still at the same addresses.
        """
        head, addresses = manifest_head(engine, state), _addresses(engine, optimizers)
        if last is not None and addresses and addresses == last.addresses:
            boxes, layout = last.boxes, last.layout
            names = {id(shard): name for name, shard in engine.named_parameters()}
            part = ManifestPart(last.tensors, None if optimizers is None else describe(optimizers, names))
        else:
            part, boxes = contents_to_write(engine, optimizers, writers)
            layout = FileLayout.of([item for item, _ in boxes])
        aliases = {alias: name for alias, name in head.aliases.items() if parameter_key(name) in part.tensors}
        manifest = replace(head, tensors=part.tensors, optimizer=part.optimizer, aliases=aliases)
        return RankContents(boxes, layout, part.tensors, addresses, manifest)


def _addresses(engine: Checkpointable, optimizers: OptimizerSet | None) -> Addresses:
    """Return where this rank's tensors are; nothing where a buffer is not contiguous, and so copied."""
    found: Addresses = []
    for name, shard in engine.named_parameters():
        found.append((name, shard.data_ptr(), shard.dtype, tuple(shard.shape)))
        state = {} if optimizers is None else optimizers.state_of(shard)
        for key, value in state.items():
            if isinstance(value, Tensor):
                found.append((key, value.data_ptr(), value.dtype, tuple(value.shape)))
    for name, buffer in engine.named_buffers():
        if not buffer.is_contiguous():
            return []
        found.append((name, buffer.data_ptr(), buffer.dtype, tuple(buffer.shape)))
    return found


@dataclass(frozen=True)
class _Copies:
    """The tensors in a half of the buffer that boxes are copied to, in the order of the file."""

    layout: FileLayout
    sources: Sequence[Tensor]
    targets: Sequence[Tensor]


class SnapshotBuffer:
    """Writes one rank's part of snapshots into the halves of a double buffer."""

    def __init__(self, folder: SnapshotFolder, rank: int) -> None:
        self._folder, self._file, self._manifest = folder, file_name(rank), manifest_name(rank)
        self._memory: dict[int, Tensor] = {}
        self._copies: dict[int, _Copies] = {}
        self._copied: list[StreamEvent] = []
        self.bytes_copied = 0
        """The bytes of all boxes that were copied into either half."""

    def reserve(self, half: int, size: int) -> None:
        """Allocate `size` bytes of shared memory for the file that is written next, and for the other if new.

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
                self._copies.pop(number, None)
                self._memory[number] = self._folder.mapped(number, self._file, size)
        except OSError as error:
            raise self._folder.no_room(error, size) from None

    def copy(self, half: int, contents: RankContents) -> None:
        """Start to copy tensors into one of the two files; the snapshot that it held is gone from now on.

        Raises CheckpointError, OSError.
        """
        self._folder.withdraw(half, self._manifest)
        self.reserve(half, contents.layout.bytes)
        copies = self._copies.get(half)
        if copies is None or copies.layout is not contents.layout:
            copies = self._copies[half] = self._prepared(half, contents)
        for target, source in zip(copies.targets, copies.sources, strict=True):
            copy_later(target, source)
            self.bytes_copied += source.nbytes
        devices = {source.device for source in copies.sources if is_accelerator(source)}
        self._copied = [StreamEvent(device) for device in devices]

    def commit(self, half: int, contents: RankContents) -> None:
        """Wait for the copies, and publish the manifest of this rank's part; any thread may call it.

        Raises OSError.
        """
        for event in self._copied:
            event.wait()
        data, layout = self._memory[half].numpy().data, contents.layout
        checksums = [
            _checksum(data[start : start + item.bytes])
            for item, start in zip(layout.items, layout.starts, strict=True)
        ]
        manifest = replace(contents.manifest, files=(layout.entry(self._file, checksums),))
        self._folder.publish(half, self._manifest, manifest_text(manifest))

    def _prepared(self, half: int, contents: RankContents) -> _Copies:
        """Write the header of a file into a half; return the tensors to copy there."""
        memory, layout = self._memory[half], contents.layout
        memory[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        views = {id(item): view for item, view in contents.boxes}
        sources = [views[id(item)] for item in layout.items]
        targets = [
            memory[start : start + item.bytes].view(source.dtype).view(source.shape)
            for item, start, source in zip(layout.items, layout.starts, sources, strict=True)
        ]
        return _Copies(layout, sources, targets)


def manifest_name(rank: int) -> str:
    """Return the name of the manifest of a rank's part of a snapshot."""
    return f"rank-{rank:05d}.json"


def _checksum(data: memoryview) -> str:
    """Return the CRC-32 of a tensor of bytes, computed in chunks so that other threads can run meanwhile."""
    crc = 0
    for start in range(0, len(data), CHUNK):
        crc = zlib.crc32(data[start : start + CHUNK], crc)
    return f"{crc:08x}"
