"""Import a folder of Hugging Face as a checkpoint of plait's own `gpt2` or `llama`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.converting import write_checkpoint
from plait.checkpoint.disk import Disk
from plait.checkpoint.huggingface.config_json import read_config, sizes_from_config
from plait.checkpoint.huggingface.tensor_names import HEAD, TensorPair, tensor_pairs
from plait.checkpoint.manifest import Manifest, TensorEntry
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.tensor_file import BoxToWrite, TensorFileReader
from plait.errors import CheckpointError, ModelError, listed
from plait.models.huggingface.weight_files import NO_WEIGHTS, files_of_tensors
from plait.plan.layout.boxes import full_box
from plait.plan.model_sizes import Decoder
from plait.version import VERSION


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
    """The tensors in the safetensors files of a folder."""

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
        """Raise CheckpointError unless the folder has exactly the tensors of `pairs`.

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
        """Return the files' key of the transformers tensor `theirs`: its name, or its name without prefix."""
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
