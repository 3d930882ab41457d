"""What torch.distributed.checkpoint wrote, entry by entry: read as tensors and plain values, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from plait.checkpoint.dcp_metadata import brief, chunk_boxes, damaged, metadata_of
from plait.layout import Box


class DcpReader:
    """A checkpoint that torch.distributed.checkpoint wrote. CheckpointError where it is none, or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, True)
        self.paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data
        """For keys that came of nested dictionaries, the keys of these."""
        entries = metadata.state_dict_metadata
        self.keys = tuple(entries)
        self.tensors = {key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)}

    def boxes(self, key: str) -> list[Box]:
        """In which a tensor is stored."""
        return chunk_boxes(self.tensors[key])

    def read(self, key: str, box: Box) -> Tensor:
        """One of the boxes, on the CPU; meanwhile there is memory for it twice. CheckpointError."""
        index = MetadataIndex(key, box.offsets)
        taken = self._read(index, LoadItemType.TENSOR, box.sizes)
        assert isinstance(taken, Tensor)
        return taken

    def value(self, key: str) -> Any:
        """What stands under a key, if it is plain: numbers, text, lists, a small tensor. CheckpointError."""
        if key not in self.tensors:
            return self._read(MetadataIndex(key), LoadItemType.BYTE_IO, ())
        boxes = self.boxes(key)
        if len(boxes) != 1:
            raise damaged(self.folder, f"{key} is a tensor in {len(boxes)} pieces")
        return self.read(key, boxes[0])

    def _read(self, index: MetadataIndex, kind: LoadItemType, sizes: tuple[int, ...]) -> object:
        start, dtype = torch.Size([0] * len(sizes)), None
        if kind is LoadItemType.TENSOR:
            dtype = self.tensors[index.fqn].properties.dtype
        planner = _Taking(dtype)
        item = ReadItem(kind, index, start, index, start, torch.Size(sizes))
        try:
            self._reader.read_data(LoadPlan([item]), planner).wait()
        except Exception as error:  # whatever torch says of bytes that are not what it wrote
            raise damaged(self.folder, f"{index.fqn} cannot be read: {brief(error)}") from None
        return planner.taken


class _Taking(DefaultLoadPlanner):
    """Takes the one entry that it is asked for."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self.taken: object = None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Memory for it: asked for when it has been found to have that size."""
        self.taken = memory = torch.empty(read_item.lengths, dtype=self._dtype)
        return memory

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """What is no tensor."""
        self.taken = torch.load(value, map_location="cpu", weights_only=True)


class _Reader(FileSystemReader):
    """Torch's reader, but for how it reads the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Without running what stands there. CheckpointError."""
        return metadata_of(Path(self.path))
