"""Export to and import from torch.distributed.checkpoint (DCP), in one process without ranks.

    export_dcp    ExportPlanner   says which boxes torch writes
    import_dcp    dcp_reader      reads what torch wrote, entry by entry, without running code in it
                  dcp_keys        finds model and optimizer among the keys

Keys are as in a native checkpoint, `model.NAME` and `optim.state.NAME.KEY`; nested, they are the dictionaries
`{"model": …, "optim": {"state": …, "param_groups": …}}` of torch's `get_state_dict`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
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
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from plait.checkpoint.dcp_keys import DcpKeys, optimizer_of, parse_keys
from plait.checkpoint.dcp_reader import DcpReader
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.full_tensors import FullTensors
from plait.checkpoint.huggingface.tensor_names import inverse, renamed_manifest
from plait.checkpoint.manifest import Manifest, TensorEntry, require_form
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.rewriting import write_checkpoint
from plait.checkpoint.tensor_file import DTYPES, BoxToWrite, TensorFileReader, grouped
from plait.errors import CheckpointError
from plait.package import VERSION
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import full_box, is_tiling

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
        """Write the entries of `plan` one at a time to files of at most `FILE_BYTES`."""
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


def export_dcp(source: Path, target: Path, names: Mapping[str, str] | None = None) -> None:
    """Write the checkpoint `source`, or the newest one in that folder, to the folder `target` in DCP format.

    `dcp.load` reads it into the dictionaries `{"model": …, "optim": …}` of `get_state_dict`, and into a flat
    dictionary of native keys; `dcp_to_torch_save` turns it into such nested dictionaries, with the options of
    the optimizer's groups. A further key, `plait`, is text that lets `import_dcp` restore the same
    checkpoint. `names`: the exported name of each parameter by plait's name, such as the `huggingface_names`
    of a model, or `tensor_names.LLAMA_NAMES`; None: plait's names. Memory: one file, at most 256 MiB, or one
    larger box. Raises `CheckpointError`, and leaves no target, where the source is damaged or the target
    cannot be written.
    """
    opened = FullTensors(source)
    _require_complete(opened.folder, opened.manifest)
    planner = ExportPlanner(opened.folder, opened.manifest, names)
    with _atomic_folder(target, Disk()) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # `no_dist` is intended
        save({}, storage_writer=ExportWriter(folder), planner=planner, no_dist=True)


def import_dcp(source: Path, target: Path, names: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Write the DCP checkpoint `source` to folder `target` in plait's format; return the keys left out.

    The source may hold the dictionaries `{"model": …, "optim": …}` of `get_state_dict`, nested in further
    dictionaries or not, or a model alone. All else in it (schedulers, random states, values that are no
    tensors) is left out; the keys left out are returned. `names`: as for `export_dcp`. The optimizer's class
    is unknown: `plait.load` accepts an optimizer whose options have the same names. No code in the files is
    run. Memory: three shards of tensors, as torch stored them. Raises `CheckpointError`, and leaves no
    target, for a source that is damaged, not of DCP, or holds what a checkpoint cannot.
    """
    reader = DcpReader(source)
    keys, own = parse_keys(reader), _plait_parts(reader)
    keys.model = {key: name for key, name in keys.model.items() if name not in own.get("aliases", {})}
    manifest = Manifest(
        tensors=_tensors(reader, keys),
        files=(),
        optimizer=optimizer_of(reader, keys, own.get("class", "")),
        **{name: own.get(name, {}) for name in OWN_PARTS},
        versions={"plait": VERSION, "torch": torch.__version__},
    )
    before = {name: name for name in manifest.tensors}  # the names in the source
    if names is not None:
        manifest, before = renamed_manifest(manifest, inverse(names))
    require_form(manifest, source)
    write_checkpoint(target, manifest, _items(reader, keys, inverse(before)), max_bytes=None, disk=Disk())
    return tuple(key for key in keys.left_out if key != OWN)


def _require_complete(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless all elements are stored: torch would export uninitialised memory."""
    for name, boxes in manifest.boxes_by_tensor().items():
        if not is_tiling(manifest.tensors[name].shape, [box.box for _, box in boxes]):
            raise CheckpointError(
                f"the checkpoint {folder} does not have all of {name}: take another checkpoint."
            )


def _tensors(reader: DcpReader, keys: DcpKeys) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for key, name in keys.tensors(reader).items():
        one = reader.tensors[key]
        if one.properties.dtype not in DTYPES:
            raise CheckpointError(
                f"the checkpoint {reader.folder} has {key} as {one.properties.dtype}, which no safetensors "
                "file can hold: write it without, or as another dtype."
            )
        found[name] = TensorEntry.of(one.size, one.properties.dtype)
    return found


def _items(reader: DcpReader, keys: DcpKeys, names: Mapping[str, str]) -> list[BoxToWrite]:
    """Return the stored boxes of all tensors, each to be written under its new key: `names[plait key]`."""
    return [
        BoxToWrite(names[name], box, reader.tensors[key].properties.dtype, partial(reader.read, key, box))
        for key, name in keys.tensors(reader).items()
        for box in reader.boxes(key)
        if box.numel
    ]


def _plait_parts(reader: DcpReader) -> Mapping[str, Any]:
    """Return the parts of plait's manifest that `export_dcp` stored in this checkpoint; empty if none."""
    if OWN not in reader.keys or OWN in reader.tensors:
        return {}
    try:
        parts = json.loads(reader.value(OWN))
    except (TypeError, ValueError, RecursionError):
        parts = None
    types = {"class": str} | dict.fromkeys(OWN_PARTS, dict)
    if not isinstance(parts, dict) or not all(isinstance(parts.get(key), of) for key, of in types.items()):
        raise CheckpointError(
            f"the checkpoint {reader.folder} has a key {OWN} that plait did not write: write it without."
        )
    return parts


@contextmanager
def _atomic_folder(target: Path, disk: Disk) -> Iterator[Path]:
    """Context `atomic_folder` that also converts errors of torch to a CheckpointError."""
    with atomic_folder(target, disk) as folder:
        try:
            yield folder
        except BaseException as error:  # CheckpointException is no Exception
            cause = error
            if isinstance(error, CheckpointException):  # has the error of each rank, here of one
                cause = next((cause for cause, _ in error.failures.values()), error)
            if isinstance(cause, CheckpointError | OSError) or not isinstance(cause, Exception):
                raise cause from None
            raise CheckpointError(
                f"{target} was not written ({cause}): make room, or choose another folder."
            ) from None
