"""Planner and writer with which torch.distributed.checkpoint exports a checkpoint of plait."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from plait.checkpoint.huggingface.renaming import renamed_manifest
from plait.checkpoint.manifest import Manifest, TensorEntry
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.tensor_file import TensorFileReader, grouped
from plait.plan.layout.boxes import full_box
from plait.plan.layout.layout import Box

OWN = "plait"
"""Key of an entry for plait: JSON of the optimizer's class and of `OWN_PARTS` of the manifest."""
OWN_PARTS = ("run", "state", "plan", "aliases")
FILE_BYTES = 1 << 28
"""Most bytes of tensors in a file; a larger box has a file of its own."""

KeyPath = tuple[str | int, ...]
"""Path of an entry in nested dictionaries and lists."""


class ExportPlanner(DefaultSavePlanner):
    """DCP save planner: each stored box of a checkpoint becomes a chunk, read only when it is written."""

    def __init__(self, folder: Path, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        """`names`: exported name by parameter name; None: unchanged. CheckpointError if a name is missing."""
        super().__init__()
        self._reader = TensorFileReader(folder)
        self._tensors = manifest.tensors
        self._boxes = {
            name: {box.offsets: (file, box) for file, box in boxes}
            for name, boxes in manifest.boxes_by_tensor().items()
        }
        self._names = {name: name for name in manifest.tensors}  # by exported key
        if names is not None:
            manifest, self._names = renamed_manifest(manifest, names)
        self._names |= {
            parameter_key(alias): self._names[parameter_key(name)] for alias, name in manifest.aliases.items()
        }
        values = {".".join(map(str, path)): (path, value) for path, value in _values(manifest).items()}
        self._values = {key: value for key, (_, value) in values.items()}
        self._paths: dict[str, KeyPath] = {name: _path(name) for name in self._names}
        self._paths |= {key: path for key, (path, _) in values.items()}

    def create_local_plan(self) -> SavePlan:
        """Return a plan to write all entries of the checkpoint: the only process writes everything."""
        items: list[WriteItem] = []
        for key, name in self._names.items():
            one = self._tensors[name]
            boxes = [box.box for _, box in self._boxes[name].values()]
            items += (_item(key, box, one) for box in boxes or [full_box(one.shape)])  # no elements: no boxes
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        return SavePlan(items, planner_data=self._paths)

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the tensor, or the serialized value, that `write_item` writes."""
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            data = BytesIO()
            torch.save(self._values[index.fqn], data)
            return data
        name = self._names[index.fqn]
        if not self._boxes[name]:
            one = self._tensors[name]
            return torch.empty(one.shape, dtype=one.torch_dtype)
        file, stored = self._boxes[name][tuple(index.offset or ())]
        return self._reader.read(file, stored.key, (), stored.entry(self._tensors[name].dtype))


class ExportWriter(FileSystemWriter):
    """Torch's `FileSystemWriter`, run for one file at a time, since it keeps a file's tensors in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the entries of `plan` to files of at most `FILE_BYTES`, one after the other."""
        results: list[WriteResult] = []
        files = grouped(plan.items, _bytes, FILE_BYTES)
        for part in self.prepare_global_plan([SavePlan(items) for items in files]):
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        """Return the storage metadata without the folder's path, as the folder is renamed when complete."""
        return StorageMeta(save_id=self.save_id)


def _path(name: str) -> KeyPath:
    """Return the nested keys of the tensor with plait key `name` in the dictionaries of `get_state_dict`."""
    if name.startswith("optim.state."):
        parameter, _, key = name.removeprefix("optim.state.").rpartition(".")
        return "optim", "state", parameter, key
    return "model", name.removeprefix("model.")


def _values(manifest: Manifest) -> dict[KeyPath, object]:
    """Return the entries of the exported checkpoint that are no tensors, by their nested keys."""
    optimizer = manifest.optimizer or {"class": "", "groups": [], "group_of": {}, "plain": {}}
    found: dict[KeyPath, object] = {}
    for number, options in enumerate(optimizer["groups"]):
        for key, value in options.items():  # torch's options are tuples, which JSON has not
            found["optim", "param_groups", number, key] = tuple(value) if isinstance(value, list) else value
        names = [name for name, group in optimizer["group_of"].items() if group == number]
        found["optim", "param_groups", number, "params"] = names
    for name, values in optimizer["plain"].items():
        found |= {("optim", "state", name, key): value for key, value in values.items()}
    own = {name: getattr(manifest, name) for name in OWN_PARTS}
    found[(OWN,)] = json.dumps({"class": optimizer["class"], **own})
    return found


def _item(name: str, box: Box, one: TensorEntry) -> WriteItem:
    offsets = torch.Size(box.offsets)
    chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(one.torch_dtype), torch.Size(one.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data and data.chunk else 0
