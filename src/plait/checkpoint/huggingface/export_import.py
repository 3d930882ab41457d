"""Export a checkpoint to a folder that `from_pretrained` of transformers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plait.checkpoint.box_reader import FullTensors
from plait.checkpoint.compatibility import require_model
from plait.checkpoint.disk import Disk, write_text
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.huggingface.config_json import CONFIG, config_json, read_config
from plait.checkpoint.huggingface.tensor_names import TensorPair, tensor_pairs
from plait.checkpoint.merged_tensors import MergedTensors
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.tensor_file import BoxToWrite, write_files
from plait.files import copy_file, make_folder
from plait.models.huggingface.weight_files import INDEX
from plait.plan.layout.boxes import full_box
from plait.plan.model_sizes import Decoder

COPIED = (
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
"""Files that are copied from the folder of the original model."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates but the default one."""


Tensors: TypeAlias = FullTensors | MergedTensors
"""Of a checkpoint, by name."""


def export_own(
    tensors: Tensors,
    target: Path,
    sizes: Decoder,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    disk: Disk | None = None,
    tokenizer: Mapping[str, Path] = MappingProxyType({}),
    end: int | None = None,
) -> None:
    """Write the parameters of plait's own `gpt2` or `llama` to the new folder `target`, for transformers.

    `config.json` and `model.safetensors`, or with `max_bytes` several files of at most that size and an
    index. `dtype`: of the parameters; None: as saved. `tokenizer`: files to copy, by their new names. `end`:
    the token that ends a text, if it is known. Memory: one tensor of transformers and one of plait.
    Raises CheckpointError where the checkpoint has other sizes, or the target exists.
    """
    config = config_json(sizes, _dtype_name(tensors, dtype)) | {"eos_token_id": end}
    _export(tensors, target, tensor_pairs(sizes), config, tokenizer, dtype, max_bytes, disk or Disk())


def export_adapted(
    tensors: Tensors,
    target: Path,
    model: nn.Sequential,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> None:
    """Write the parameters of `model`, made by `from_huggingface`, to the new folder `target`.

    `folder`: of the original model. Its tokenizer files are copied, and its `config.json` with the new dtype.
    Otherwise as `export_own`.
    """
    names: Mapping[str, str] = model.huggingface_names  # type: ignore[assignment]
    pairs = [
        TensorPair(names[name], (name,), tuple(one.shape))
        for name, one in model.named_parameters()
        if name in names
    ]
    config = read_config(folder)
    config.pop("torch_dtype", None)  # the former name of dtype
    config.pop("transformers_weights", None)  # the name of a file that is not written here
    templates = [f"{CHAT_TEMPLATES}/{one.name}" for one in sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))]
    copied = {name: folder / name for name in (*COPIED, *templates) if _is_own_file(folder, name)}
    config["dtype"] = _dtype_name(tensors, dtype)
    _export(tensors, target, pairs, config, copied, dtype, max_bytes, Disk())


def _is_own_file(folder: Path, name: str) -> bool:
    """Return whether `folder` has a file of this name, and no link to a file elsewhere.

    Folders in the cache of Hugging Face are links into the folder `blobs` of the same model.
    """
    path, real = folder / name, os.path.realpath(folder)
    homes = (os.path.join(real, Path(name).parent), os.path.join(os.path.dirname(real), "..", "blobs"))
    return path.is_file() and os.path.dirname(os.path.realpath(path)) in map(os.path.normpath, homes)


def _export(
    tensors: Tensors,
    target: Path,
    pairs: Sequence[TensorPair],
    config: Mapping[str, Any],
    copied: Mapping[str, Path],
    dtype: torch.dtype | None,
    max_bytes: int | None,
    disk: Disk,
) -> None:
    shapes = {name: pair.shape for pair in pairs for name in pair.ours}
    require_model(tensors.manifest, shapes, aliases=())
    items = [_item(tensors, pair, dtype) for pair in pairs]
    with atomic_folder(target, disk) as folder:
        files = write_files(folder, "model", items, max_bytes=max_bytes, disk=disk)
        if len(files) > 1:
            weight_map = {box.tensor: file.name for file in files for box in file.boxes}
            total = sum(item.bytes for item in items)
            _write_json(disk, folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(disk, folder / CONFIG, config)
        for name, path in copied.items():
            make_folder((folder / name).parent)
            copy_file(path, folder / name)


def _item(tensors: Tensors, pair: TensorPair, dtype: torch.dtype | None) -> BoxToWrite:
    to = dtype or tensors.dtype(parameter_key(pair.ours[0]))
    read = partial(_theirs, tensors, pair, to)
    return BoxToWrite(pair.theirs, full_box(pair.their_shape), to, read, name=pair.theirs)


def _theirs(tensors: Tensors, pair: TensorPair, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the transformers model, concatenated from tensors of the checkpoint."""
    if len(pair.ours) == 1 and not pair.transposed:
        return tensors.read(parameter_key(pair.ours[0]), dtype)
    joined = torch.empty(pair.their_shape, dtype=dtype)
    for name, target in zip(pair.ours, joined.chunk(len(pair.ours), dim=-1), strict=True):
        part = tensors.read(parameter_key(name))
        target.copy_(part.t() if pair.transposed else part)
    return joined


def _dtype_name(tensors: Tensors, dtype: torch.dtype | None) -> str:
    """Return the name of `dtype`, such as `bfloat16`; if it is None, that of most saved parameters."""
    if dtype is not None:
        return str(dtype).removeprefix("torch.")
    saved = [one.dtype for name, one in tensors.manifest.tensors.items() if name.startswith("model.")]
    return max(set(saved), key=saved.count, default="float32")


def _write_json(disk: Disk, path: Path, content: Mapping[str, Any]) -> None:
    write_text(disk, path, json.dumps(content, indent=2) + "\n")
