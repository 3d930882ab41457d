"""`DcpReader`: reads tensors and plain values from a checkpoint of torch.distributed.checkpoint."""

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
    """A checkpoint of torch.distributed.checkpoint. CheckpointError where it is none, or is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, True)
        self.paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data
        """For each key of a flattened nested dictionary, the keys of its levels."""
        entries = metadata.state_dict_metadata
        self.keys = tuple(entries)
        self.tensors = {key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)}

    def read(self, key: str, box: Box) -> Tensor:
        """Return a stored box of a tensor, on the CPU. CheckpointError. Memory: the box twice."""
        found = self._read(MetadataIndex(key, box.offsets), LoadItemType.TENSOR, box.sizes)
        assert isinstance(found, Tensor)
        return found

    def value(self, key: str) -> Any:
        """Return a plain value: a number, text, list or tensor of one chunk. CheckpointError for others."""
        if key not in self.tensors:
            return self._read(MetadataIndex(key), LoadItemType.BYTE_IO, ())
        boxes = chunk_boxes(self.tensors[key])
        if len(boxes) != 1:
            raise damaged(self.folder, f"{key} is a tensor in {len(boxes)} pieces")
        return self.read(key, boxes[0])

    def _read(self, index: MetadataIndex, kind: LoadItemType, sizes: tuple[int, ...]) -> object:
        start, dtype = torch.Size([0] * len(sizes)), None
        if kind is LoadItemType.TENSOR:
            dtype = self.tensors[index.fqn].properties.dtype
        planner = _SingleEntryPlanner(dtype)
        item = ReadItem(kind, index, start, index, start, torch.Size(sizes))
        try:
            self._reader.read_data(LoadPlan([item]), planner).wait()
        except Exception as error:  # damaged bytes can make torch raise any error
            raise damaged(self.folder, f"{index.fqn} cannot be read: {brief(error)}") from None
        return planner.entry


class _SingleEntryPlanner(DefaultLoadPlanner):
    """Loads one entry."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self.entry: object = None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the memory to read into; torch has compared the sizes before."""
        self.entry = memory = torch.empty(read_item.lengths, dtype=self._dtype)
        return memory

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Load an entry that is no tensor."""
        self.entry = torch.load(value, map_location="cpu", weights_only=True)


class _Reader(FileSystemReader):
    """Torch's reader, except that reading the metadata runs no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. CheckpointError."""
        return metadata_of(Path(self.path))
