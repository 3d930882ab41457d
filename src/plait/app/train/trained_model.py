"""The model that a run trained, read from a checkpoint: tensors, LoRA adapters and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from torch import nn

from plait.app.config.config_sections import DataConfig
from plait.app.config.model_section import LoraConfig, ModelConfig
from plait.app.data.corpus_manifest import read_index
from plait.app.data.recorded_tokenizer import recorded_tokenizer
from plait.app.data.tokenizer import open_tokenizer
from plait.app.data.tokenizer_json import files_hash, tokenizer_files
from plait.app.train.trainer import build_model
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.full_tensors import Adapter, FullTensors, MergedTensors
from plait.checkpoint.manifest import Manifest, section
from plait.checkpoint.rank_contents import parameter_key
from plait.errors import CheckpointError, DataError, PlaitError
from plait.files import validated
from plait.models.lora import adapted_weight, adapters_of, is_transposed, weight_with_adapter
from plait.models.peft_files import save_adapter

Section = TypeVar("Section", bound=BaseModel)


TOKENIZER = "tokenizer_hash"
"""The key, in the state of a checkpoint, of the hash of the files of the run's tokenizer."""


_TOKEN_EMBEDDING = parameter_key("embedding.token.weight")
"""In plait's own models: one row for each token."""


class TrainedTokenizer(NamedTuple):
    """The files and the end token of the tokenizer of a run's data, or a note on why they are left out."""

    files: Mapping[str, Path]
    """Its files by their names; none where the data are bytes, and where `note` says why."""
    end: int | None = None
    """The token that ends a text, if it is known."""
    note: str = ""
    """A sentence about files that the checkpoint names, and that are not those of the run."""


def trained_model(manifest: Manifest, folder: Path | None) -> nn.Sequential:
    """Return the model that a run's checkpoint describes, on the meta device, with its LoRA adapters, if any.

    `folder`: that of the model of Hugging Face; None: the model is plait's own.
    """
    settings = section(manifest.state, "config", "model")
    if folder is not None:
        settings = {"name": str(folder), "lora": section(settings, "lora")}
    config = _configured(ModelConfig, settings)
    return build_model(config, vocabulary(config, manifest))


def vocabulary(config: ModelConfig, manifest: Manifest) -> int:
    """Return the vocabulary size of plait's own model in a checkpoint; 1 for other models."""
    tokens = manifest.tensors.get(_TOKEN_EMBEDDING)
    return config.vocab or (tokens.shape[0] if tokens and tokens.shape else 1)


def merged_tensors(tensors: FullTensors, folder: Path | None) -> MergedTensors:
    """Return a reader of a checkpoint's tensors that adds LoRA adapters, if any, to the adapted weights.

    `folder`: as for `trained_model`. Raises CheckpointError for adapters that no run of `plait train` saved.
    """
    lora = _configured(LoraConfig, section(tensors.manifest.state, "config", "model", "lora"))
    adapters = _adapters(trained_model(tensors.manifest, folder)) if lora.adapts else {}
    return MergedTensors(tensors, adapters)


def write_peft_adapter(tensors: FullTensors, folder: Path, target: Path) -> None:
    """Write the adapters in a checkpoint to the new folder `target`, as peft does; `folder`: the model's.

    Raises CheckpointError as `merged_tensors`, and ModelError where there are no adapters.
    """
    model = trained_model(tensors.manifest, folder)
    adapters = _adapters(model)
    MergedTensors(tensors, adapters)  # refuses other adapters
    names = [name for adapter in adapters.values() for name in adapter.shapes]
    values = {name: tensors.read(parameter_key(name)) for name in names}
    with atomic_folder(target, Disk()) as opened:
        save_adapter(model, opened, values, str(folder))


def trained_tokenizer(manifest: Manifest) -> TrainedTokenizer:
    """Return the tokenizer that a checkpoint names, if its files have the recorded hash; else a note.

    A checkpoint of somebody else may name any file of this machine: one is only opened where its content has
    the hash that was recorded when the checkpoint was written.
    """
    settings = section(manifest.state, "config", "data")
    used = {name: settings[name] for name in ("source", "tokenizer", "mixture") if name in settings}
    data = _configured(DataConfig, used)
    name = data.known_tokenizer or "bytes"
    files = tokenizer_files(name)
    if not files:
        return TrainedTokenizer({})
    try:
        is_recorded = files_hash(name) == manifest.state.get(TOKENIZER)
    except DataError:
        is_recorded = False
    if not is_recorded:
        return TrainedTokenizer({}, None, _OTHER_TOKENIZER.format(name))
    folders = [Path(one).expanduser() for one in data.sources if recorded_tokenizer(one)]
    ends = [end for folder in folders if (end := read_index(folder).end) is not None]
    try:
        after = open_tokenizer(name).surrounding(None).after
        return TrainedTokenizer(files, ends[0] if ends else after[-1] if after else None)
    except PlaitError:  # without the package, or the token is not in the vocabulary
        return TrainedTokenizer(files)


_OTHER_TOKENIZER = (
    "Left out the tokenizer: the checkpoint names {}, and holds no hash of these files, or another: copy "
    "them yourself if they are those of the run."
)


def _configured(kind: type[Section], settings: Mapping[str, Any]) -> Section:
    """Return a section of a run's configuration from a checkpoint. Raises CheckpointError for a bad value."""
    try:
        return validated(kind, json.dumps(dict(settings)))
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint's state holds no configuration of a run ({error}): take another checkpoint."
        ) from None


def _adapters(model: nn.Module) -> Mapping[str, Adapter]:
    """Return the adapters of `model` by the name of the weight that they are added to."""
    return {
        adapted_weight(path, one): Adapter(
            {f"{path}.{half}": tuple(weight.shape) for half, weight in one.halves.items()},
            partial(weight_with_adapter, scale=one.scale, transposed=is_transposed(one)),
        )
        for path, one in adapters_of(model).items()
    }
