"""A checkpoint as a folder that `from_pretrained` of transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.disk import Disk, write_text
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.full_tensor_files import FullTensors, write_files
from plait.checkpoint.huggingface import configs
from plait.checkpoint.huggingface.model_sizes import ModelSizes
from plait.checkpoint.huggingface.tensor_names import TensorPair, tensor_pairs
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.tensor_file import BoxToWrite
from plait.errors import CheckpointError, listed
from plait.layout.boxes import full_box
from plait.weight_files import INDEX

BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that belong to a model and that training does not change."""


def export_own(
    wholes: FullTensors,
    target: Path,
    sizes: ModelSizes,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    disk: Disk | None = None,
) -> None:
    """Write the parameters of one of plait's own models to the new folder `target`.

    `config.json` and `model.safetensors`; with `max_bytes`, in several files of at most that size, with an
    index. `dtype`: of floating-point numbers; None: as they were saved. Memory: one tensor of theirs and one
    of ours. Raises CheckpointError where the checkpoint is of other sizes, or the target is taken.
    """
    config = configs.config_json(sizes, _word(wholes, dtype))
    _export(wholes, target, tensor_pairs(sizes), config, (), dtype, max_bytes, disk or Disk())


def export_adapted(
    wholes: FullTensors,
    target: Path,
    model: nn.Sequential,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    disk: Disk | None = None,
) -> None:
    """The same for `model`, of transformers, as `from_huggingface` gives it; `folder` is where it came from.

    Its `config.json`, and its tokenizer if there is one, are written beside the parameters.
    """
    names: Mapping[str, str] = model.huggingface_names  # type: ignore[assignment]
    pairs = [TensorPair(names[name], (name,), tuple(one.shape)) for name, one in model.named_parameters()]
    config = configs.read_config(folder)
    config.pop("torch_dtype", None)  # what it was called once
    beside = [folder / name for name in BESIDE if (folder / name).is_file()]
    config["dtype"] = _word(wholes, dtype)
    _export(wholes, target, pairs, config, beside, dtype, max_bytes, disk or Disk())


def _export(
    wholes: FullTensors,
    target: Path,
    pairs: Sequence[TensorPair],
    config: Mapping[str, Any],
    beside: Sequence[Path],
    dtype: torch.dtype | None,
    max_bytes: int | None,
    disk: Disk,
) -> None:
    _require_fit(wholes, pairs)
    items = [_item(wholes, pair, dtype) for pair in pairs]
    with atomic_folder(target, disk) as folder:
        files = write_files(folder, "model", items, max_bytes=max_bytes, disk=disk)
        if len(files) > 1:
            place = {box.tensor: file.name for file in files for box in file.boxes}
            total = sum(item.bytes for item in items)
            _write_json(disk, folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place})
        _write_json(disk, folder / configs.FILE, config)
        for path in beside:
            shutil.copyfile(path, folder / path.name)


def _require_fit(wholes: FullTensors, pairs: Sequence[TensorPair]) -> None:
    """CheckpointError unless the checkpoint has just these parameters."""
    wanted = {parameter_key(name): pair.shape for pair in pairs for name in pair.ours}
    there = {name: one.shape for name, one in wholes.manifest.tensors.items() if name.startswith("model.")}
    flaws = [
        f"{name.removeprefix('model.')} is {_told(there.get(name))} and not {_told(wanted.get(name))}"
        for name in sorted(wanted.keys() | there.keys())
        if wanted.get(name) != there.get(name)
    ]
    if flaws:
        raise CheckpointError(
            f"the checkpoint {wholes.folder} is of another model ({listed(flaws, between='; ')}): "
            "give the sizes, or the folder, of the model that was saved."
        )


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _item(wholes: FullTensors, pair: TensorPair, dtype: torch.dtype | None) -> BoxToWrite:
    to = dtype or wholes.dtype(parameter_key(pair.ours[0]))
    read = partial(_theirs, wholes, pair, to)
    return BoxToWrite(pair.theirs, full_box(pair.their_shape), to, read, name=pair.theirs)


def _theirs(wholes: FullTensors, pair: TensorPair, dtype: torch.dtype) -> Tensor:
    """A tensor of theirs, made of ours one by one."""
    if len(pair.ours) == 1 and not pair.transposed:
        return wholes.read(parameter_key(pair.ours[0]), dtype)
    joined = torch.empty(pair.their_shape, dtype=dtype)
    for name, place in zip(pair.ours, joined.chunk(len(pair.ours), dim=-1), strict=True):
        part = wholes.read(parameter_key(name))
        place.copy_(part.t() if pair.transposed else part)
    return joined


def _word(wholes: FullTensors, dtype: torch.dtype | None) -> str:
    """The dtype of the model as transformers says it: that of most parameters."""
    if dtype is not None:
        return str(dtype).removeprefix("torch.")
    saved = [one.dtype for name, one in wholes.manifest.tensors.items() if name.startswith("model.")]
    return max(set(saved), key=saved.count, default="float32")


def _write_json(disk: Disk, path: Path, content: Mapping[str, Any]) -> None:
    write_text(disk, path, json.dumps(content, indent=2) + "\n")
