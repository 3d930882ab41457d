"""To and from checkpoints of torch.distributed.checkpoint (DCP), in one process and without any ranks.

    export_dcp    dcp_planning    what torch is to write, box by box
    import_dcp    dcp_source      what torch wrote, entry by entry
                  dcp_metadata    what there is, read without running anything
                  dcp_names       what the keys mean

Keys are as in a native checkpoint, `model.NAME` and `optim.state.NAME.KEY`; nested, they are the dictionaries
`{"model": …, "optim": {"state": …, "param_groups": …}}` of torch's `get_state_dict`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from plait.checkpoint.dcp_keys import DcpKeys, optimizer_of, parse_keys
from plait.checkpoint.dcp_planner import OWN, OWN_PARTS, ExportPlanner, ExportWriter
from plait.checkpoint.dcp_reader import DcpReader
from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.full_tensor_files import FullTensors, write_checkpoint
from plait.checkpoint.manifest import Manifest, TensorEntry, require_form
from plait.checkpoint.renaming import inverse, renamed
from plait.checkpoint.tensor_file import DTYPES, BoxToWrite
from plait.errors import CheckpointError
from plait.layout import Box
from plait.layout.boxes import is_tiling


def export_dcp(source: Path, target: Path, names: Mapping[str, str] | None = None) -> None:
    """Write the checkpoint `source`, or the newest in that folder, to the folder `target` as torch does.

    `dcp.load` reads it into `{"model": …, "optim": …}` as `get_state_dict` gives them, and into a flat
    dictionary of native keys; `dcp_to_torch_save` makes such nested dictionaries of it, with the options of
    the optimizer's groups. One key more, `plait`, is text: what `import_dcp` needs to make the same
    checkpoint again. `names`: for plait's name of each parameter the one that it gets, such as the
    `huggingface_names` of a model, or `renaming.LLAMA_NAMES`; None: plait's. Memory: what goes into one file,
    at most 256 MiB, or one box if that is larger. Raises `CheckpointError` where the source is damaged, or
    the target cannot be written; then there is none.
    """
    opened = FullTensors(source)
    _require_all(opened.folder, opened.manifest)
    planner = ExportPlanner(opened.folder, opened.manifest, names)
    with _folder_for(target, Disk()) as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be here
        save({}, storage_writer=ExportWriter(place), planner=planner, no_dist=True)


def import_dcp(source: Path, target: Path, names: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Write what torch wrote to the folder `source` as a native checkpoint, to the folder `target`.

    It may be of `{"model": …, "optim": …}`, as `get_state_dict` gives them, in further dictionaries or not,
    or of a model alone. What else is in it (states of schedulers, of random numbers, values that are no
    tensors) is not taken along; its keys are returned. `names`: for plait's name of each parameter the one
    that it has there, as for `export_dcp`; None: the same. Of the optimizer's class nothing is known:
    `plait.load` gives its state to one whose options have the same names.
    Nothing in the files is run. Memory: three pieces of tensors, as torch stored them. Raises
    `CheckpointError` for what is damaged, not torch's, or has no place in a checkpoint; then there is none.
    """
    found = DcpReader(source)
    told, own = parse_keys(found), _own(found)
    table = None
    if names is not None:
        table = inverse(names)
        told.rename(table)
        own = {**own, "aliases": _renamed_aliases(own.get("aliases", {}), table)}
    told.model = {key: name for key, name in told.model.items() if name not in own.get("aliases", {})}
    manifest = Manifest(
        tensors=_tensors(found, told),
        files=(),
        optimizer=optimizer_of(found, told, own.get("class", ""), table),
        **{name: own.get(name, {}) for name in OWN_PARTS},
        versions={"plait": version("plait"), "torch": torch.__version__},
    )
    require_form(manifest, source)
    write_checkpoint(target, manifest, _items(found, told), max_bytes=None, disk=Disk())
    return tuple(key for key in told.left_out if key != OWN)


def _renamed_aliases(aliases: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    names = renamed([*aliases, *aliases.values()], table)
    return {names[alias]: names[name] for alias, name in aliases.items()}


def _require_all(folder: Path, manifest: Manifest) -> None:
    """CheckpointError unless every tensor is there: torch would read what is not as anything."""
    boxes: dict[str, list[Box]] = {name: [] for name in manifest.tensors}
    for file in manifest.files:
        for box in file.boxes:
            boxes[box.tensor].append(box.box)
    for name, one in manifest.tensors.items():
        if not is_tiling(one.shape, boxes[name]):
            raise CheckpointError(
                f"the checkpoint {folder} does not have all of {name}: take another checkpoint."
            )


def _tensors(source: DcpReader, told: DcpKeys) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for key, name in told.tensors(source).items():
        one = source.tensors[key]
        if one.properties.dtype not in DTYPES:
            raise CheckpointError(
                f"the checkpoint {source.folder} has {key} as {one.properties.dtype}, which no safetensors "
                "file can hold: write it without, or as another dtype."
            )
        found[name] = TensorEntry(tuple(one.size), str(one.properties.dtype).partition(".")[2])
    return found


def _items(source: DcpReader, told: DcpKeys) -> list[BoxToWrite]:
    """The pieces that torch stored, to be read one by one."""
    return [
        BoxToWrite(name, box, source.tensors[key].properties.dtype, partial(source.read, key, box))
        for key, name in told.tensors(source).items()
        for box in source.boxes(key)
        if prod(box.sizes)
    ]


def _own(source: DcpReader) -> Mapping[str, Any]:
    """What `export_dcp` said beside; nothing, where torch alone wrote."""
    if OWN not in source.keys or OWN in source.tensors:
        return {}
    try:
        told = json.loads(source.value(OWN))
    except (TypeError, ValueError, RecursionError):
        told = None
    kinds = {"class": str} | dict.fromkeys(OWN_PARTS, dict)
    if not isinstance(told, dict) or not all(isinstance(told.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(
            f"the checkpoint {source.folder} has a key {OWN} that plait did not write: write it without."
        )
    return told


@contextmanager
def _folder_for(target: Path, disk: Disk) -> Iterator[Path]:
    """As `atomic_folder`, where any failure is a CheckpointError, whatever torch has wrapped it in."""
    with atomic_folder(target, disk) as place:
        try:
            yield place
        except BaseException as error:  # torch's is no Exception
            cause = _cause(error)
            if isinstance(cause, CheckpointError | OSError) or not isinstance(cause, Exception):
                raise cause from None
            raise CheckpointError(
                f"{target} was not written ({cause}): make room, or choose another folder."
            ) from None


def _cause(error: BaseException) -> BaseException:
    """Of what torch gathered from its ranks, which is one, the error itself."""
    if isinstance(error, CheckpointException):
        return next((cause for cause, _ in error.failures.values()), error)
    return error
