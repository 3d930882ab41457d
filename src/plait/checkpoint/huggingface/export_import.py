"""Export a checkpoint to a folder of Hugging Face, and import one as plait's own `gpt2` or `llama`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plait.checkpoint.compatibility import require_model
from plait.checkpoint.file_system_calls import Disk, write_text
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.full_tensors import FullTensors, MergedTensors
from plait.checkpoint.huggingface.config_json import CONFIG, config_json, read_config, sizes_from_config
from plait.checkpoint.huggingface.tensor_names import HEAD, TensorPair, tensor_pairs
from plait.checkpoint.manifest import Manifest, TensorEntry
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.rewriting import write_checkpoint
from plait.checkpoint.tensor_file import BoxToWrite, TensorFileReader, write_files
from plait.errors import CheckpointError, ModelError, listed
from plait.files import copy_file, make_folder
from plait.models.huggingface.expert_tensors import (
    SAVED_BY_TRANSFORMERS,
    ExpertNames,
    expert_names_in,
    is_of_experts,
)
from plait.models.huggingface.quantized_weights import QUANTIZATION
from plait.models.huggingface.weight_files import INDEX, NO_WEIGHTS, files_of_tensors
from plait.models.layers.layer_sequence import saved_tensors
from plait.package import VERSION
from plait.plan.decoder_sizes import Decoder
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import full_box

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


@dataclass(frozen=True)
class ExpertMatrix:
    """One expert's matrix: its tensor in transformers, and the box of plait's tensor that holds it."""

    theirs: str
    ours: tuple[str]
    shape: tuple[int, ...]
    """Shape of the tensor of plait."""
    box: Box


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
    """Write `tensors`, of a `model` made by `from_huggingface`, to the new folder `target` for transformers.

    `folder`: of the original model. Its tokenizer files are copied, and its `config.json` with the new dtype.
    Experts have a tensor each if they have in `folder`; without weights there, if transformers saves such a
    model so. Otherwise as `export_own`.
    """
    names: Mapping[str, str] = model.huggingface_names  # type: ignore[assignment]
    config = read_config(folder)
    experts = _expert_names(folder, config) if any(map(is_of_experts, names.values())) else None
    pairs = [
        pair
        for name, one in saved_tensors(model).items()
        if name in names
        for pair in _pairs(name, names[name], one, experts)
    ]
    config.pop("torch_dtype", None)  # the former name of dtype
    config.pop("transformers_weights", None)  # the name of a file that is not written here
    config.pop(QUANTIZATION, None)  # the weights that are written are those that were trained
    templates = [f"{CHAT_TEMPLATES}/{one.name}" for one in sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))]
    copied = {name: folder / name for name in (*COPIED, *templates) if _is_own_file(folder, name)}
    config["dtype"] = _dtype_name(tensors, dtype)
    _export(tensors, target, pairs, config, copied, dtype, max_bytes, Disk())


def _expert_names(folder: Path, config: Mapping[str, Any]) -> ExpertNames | None:
    """Return how the folder names the tensors of single experts; None where one tensor has all of them."""
    files = files_of_tensors(folder)
    return expert_names_in(files) if files else SAVED_BY_TRANSFORMERS.get(str(config.get("model_type")))


def _pairs(
    ours: str, theirs: str, tensor: Tensor, experts: ExpertNames | None
) -> Iterator[TensorPair | ExpertMatrix]:
    """Yield the tensors of files that hold the values of plait's tensor `ours`, `theirs` in transformers."""
    shape = tuple(tensor.shape)
    if experts is None or not is_of_experts(theirs):
        key = theirs if experts is None else experts.in_files(theirs)
        yield TensorPair(key, (ours,), shape, is_buffer=not isinstance(tensor, nn.Parameter))
    else:
        path, _, attribute = theirs.rpartition(".")
        matrices = experts.joined()[attribute]
        count, rows, columns = shape[0], shape[1] // len(matrices), shape[2]
        for number, (place, matrix) in product(range(count), enumerate(matrices)):
            box = Box((number, place * rows, 0), (1, rows, columns))
            yield ExpertMatrix(experts.key(path, number, matrix), (ours,), shape, box)


def _is_own_file(folder: Path, name: str) -> bool:
    """Return whether `folder` holds this file itself, or in `blobs`, as the cache of Hugging Face does."""
    path, real = folder / name, os.path.realpath(folder)
    homes = (os.path.join(real, Path(name).parent), os.path.join(os.path.dirname(real), "..", "blobs"))
    return path.is_file() and os.path.dirname(os.path.realpath(path)) in map(os.path.normpath, homes)


def _export(
    tensors: Tensors,
    target: Path,
    pairs: Sequence[TensorPair | ExpertMatrix],
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


def _item(tensors: Tensors, pair: TensorPair | ExpertMatrix, dtype: torch.dtype | None) -> BoxToWrite:
    saved = tensors.dtype(parameter_key(pair.ours[0]))
    to = saved if dtype is None or (isinstance(pair, TensorPair) and pair.is_buffer) else dtype
    if isinstance(pair, ExpertMatrix):
        read_one = partial(_of_one_expert, tensors, pair, to)
        return BoxToWrite(pair.theirs, full_box(pair.box.sizes[1:]), to, read_one, name=pair.theirs)
    read = partial(_theirs, tensors, pair, to)
    return BoxToWrite(pair.theirs, full_box(pair.their_shape), to, read, name=pair.theirs)


def _of_one_expert(tensors: Tensors, pair: ExpertMatrix, dtype: torch.dtype) -> Tensor:
    return tensors.read_box(parameter_key(pair.ours[0]), pair.box, dtype)[0]


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
    saved = [one.dtype for one in tensors.manifest.parameters.values()]
    return max(set(saved), key=saved.count, default="float32")


def _write_json(disk: Disk, path: Path, content: Mapping[str, Any]) -> None:
    write_text(disk, path, json.dumps(content, indent=2) + "\n")


def import_folder(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    disk: Disk | None = None,
) -> Decoder:
    """Write the weights in `source` as a checkpoint to the new folder `target`; return the model's sizes.

    `source` has `config.json` and safetensors, in one file or in several. The checkpoint has parameters only
    (load it with None for the optimizer), and a `state` with the sizes under "sizes". `dtype`: of parameters;
    None: as in the folder. `max_bytes`: as for `convert`. Memory: one tensor. Raises CheckpointError for a
    model that is not exactly plait's own, and for weights that are missing or do not fit.
    """
    sizes = sizes_from_config(read_config(source), source)
    weights = Weights(source)
    pairs = tensor_pairs(sizes)
    weights.require_compatible(pairs, tied=sizes.tied)
    items = list(_items(weights, pairs, dtype))
    tensors = {item.tensor: TensorEntry.of(item.box.sizes, item.dtype) for item in items}
    state = {"sizes": {"family": sizes.family, **asdict(sizes)}}
    head = Manifest(tensors, (), state=state, versions={"plait": VERSION})
    write_checkpoint(target, head, items, max_bytes=max_bytes, disk=disk or Disk())
    return sizes


class Weights:
    """Reads the tensors in the safetensors files of a Hugging Face folder, by their names there."""

    def __init__(self, folder: Path) -> None:
        """Open all safetensors files of a folder. Raises CheckpointError where one is missing or damaged."""
        try:
            self._files = files_of_tensors(folder)
        except ModelError as error:
            raise CheckpointError(str(error)) from None
        if not self._files:
            raise CheckpointError(
                f"{folder} has no safetensors: load the model with transformers and save it with "
                "save_pretrained."
            )
        self._folder = folder
        self._reader = TensorFileReader(folder)
        self._known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for file in sorted(set(self._files.values())):
            self._known |= self._reader.contents(file)

    def require_compatible(self, pairs: Iterable[TensorPair], *, tied: bool) -> None:
        """Raise CheckpointError unless the folder has exactly the tensors that `pairs` name.

        If `tied`, the folder may also have a head, which must equal the embedding.
        """
        wanted = {self.key(pair.theirs): pair for pair in pairs}
        errors = [f"{pair.theirs} is missing" for key, pair in wanted.items() if key not in self._known]
        for key, (shape, _) in self._known.items():
            if key in wanted and shape != wanted[key].their_shape:
                errors.append(f"{key} is {list(shape)} and not {list(wanted[key].their_shape)}")
            elif key not in wanted and not key.endswith(NO_WEIGHTS) and not (tied and key == HEAD):
                errors.append(f"{key} is unexpected")
        if not errors and tied and HEAD in self._known:
            embedding = next(key for key, pair in wanted.items() if pair.ours == ("embedding.token.weight",))
            if not torch.equal(self.read(HEAD), self.read(embedding)):
                errors.append(f"{HEAD} is not {embedding}, though tie_word_embeddings is on")
        if errors:
            raise CheckpointError(
                f"the weights in {self._folder} do not fit its config.json "
                f"({listed(errors, between='; ')}): give a folder that is whole."
            )

    def key(self, theirs: str) -> str:
        """Return the name of the transformers tensor `theirs` in the files, which may lack a prefix."""
        body = theirs.partition(".")[2]
        return body if theirs not in self._known and theirs != HEAD and body in self._known else theirs

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._known[key][1]

    def read(self, key: str, within: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor, or only the part `within` the given slices."""
        return self._reader.read(self._files[key], key, within)


def _items(weights: Weights, pairs: Iterable[TensorPair], dtype: torch.dtype | None) -> Iterator[BoxToWrite]:
    for pair in pairs:
        key = weights.key(pair.theirs)
        to = dtype or weights.dtype(key)
        for number, name in enumerate(pair.ours):
            read = partial(_ours, weights, key, pair, number, to)
            yield BoxToWrite(parameter_key(name), full_box(pair.shape), to, read)


def _ours(weights: Weights, key: str, pair: TensorPair, number: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the plait model: part `number`, along the last dim, of a tensor of transformers."""
    *others, width = reversed(pair.shape) if pair.transposed else pair.shape
    within = (*(slice(0, size) for size in others), slice(number * width, (number + 1) * width))
    part = weights.read(key, within)
    return (part.t() if pair.transposed else part).to(dtype)
