"""Export to and import from torch.distributed.checkpoint (DCP), in one process without ranks.

    export_dcp    dcp_planner     which boxes torch writes
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
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from plait.checkpoint.box_reader import FullTensors
from plait.checkpoint.converting import write_checkpoint
from plait.checkpoint.dcp_keys import DcpKeys, optimizer_of, parse_keys
from plait.checkpoint.dcp_planner import OWN, OWN_PARTS, ExportPlanner, ExportWriter
from plait.checkpoint.dcp_reader import DcpReader
from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.huggingface.renaming import inverse, renamed_manifest
from plait.checkpoint.manifest import Manifest, TensorEntry, require_form
from plait.checkpoint.tensor_file import DTYPES, BoxToWrite
from plait.errors import CheckpointError
from plait.plan.layout.boxes import is_tiling
from plait.version import VERSION


def export_dcp(source: Path, target: Path, names: Mapping[str, str] | None = None) -> None:
    """Write the checkpoint `source`, or the newest one in that folder, to the folder `target` in DCP format.

    `dcp.load` reads it into the dictionaries `{"model": …, "optim": …}` of `get_state_dict`, and into a flat
    dictionary of native keys; `dcp_to_torch_save` turns it into such nested dictionaries, with the options of
    the optimizer's groups. A further key, `plait`, is text that lets `import_dcp` restore the same
    checkpoint. `names`: the exported name of each parameter by plait's name, such as the `huggingface_names`
    of a model, or `renaming.LLAMA_NAMES`; None: plait's names. Memory: one file, at most 256 MiB, or one
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
    """Write the DCP checkpoint `source` as a native checkpoint to the folder `target`.

    The source may hold the dictionaries `{"model": …, "optim": …}` of `get_state_dict`, nested in further
    dictionaries or not, or a model alone. All else in it (schedulers, random states, values that are no
    tensors) is left out; the keys left out are returned. `names`: as for `export_dcp`. The optimizer's class
    is unknown: `plait.load` accepts an optimizer whose options have the same names. No code in the files is
    run. Memory: three pieces of tensors, as torch stored them. Raises `CheckpointError`, and leaves no
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
