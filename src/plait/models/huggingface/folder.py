"""Models that lie in a folder, as `save_pretrained` of transformers leaves them: sizes, layers, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError, PlaitError, listed
from plait.models.huggingface.adapter import FAMILIES, from_huggingface
from plait.weight_files import NO_WEIGHTS, files_of_tensors

_MOST_TOLD = 5
_MOST_OF_A_REASON = 200
MOST_LAYERS, MOST = 10_000, 2**31 - 1
"""Of layers, and of any other size: more would only take time, or overflow, until it is refused."""


@dataclass(frozen=True)
class Sizes:
    """What `config.json` says, in plait's words."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int
    tied: bool


def sizes_in(folder: Path) -> Sizes:
    """The sizes of the model in `folder`. ModelError where it cannot be read."""
    config = _config(folder)
    try:
        sizes = Sizes(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            context=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
        )
    except AttributeError as error:
        raise ModelError(
            f"{folder / 'config.json'} is that of a {type(config).__name__}, whose sizes plait cannot read "
            f"({error}): give the folder of one of {', '.join(FAMILIES)}."
        ) from None
    for name, size in asdict(sizes).items():
        most = MOST_LAYERS if name == "layers" else MOST
        if name != "tied" and (type(size) is not int or not 1 <= size <= most):
            raise ModelError(
                f"{folder / 'config.json'} has {size!r} for {name}: give a whole number from 1 to {most}."
            )
    return sizes


def model_in(folder: Path) -> nn.Sequential:
    """The model in `folder` as layers on the meta device. ModelError as `from_huggingface`."""
    transformers = _transformers()
    config = _config(folder)
    if getattr(config, "num_hidden_layers", None) is not None:  # else the family is not known either
        sizes_in(folder)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        return from_huggingface(model)
    except PlaitError:
        raise
    except Exception as error:  # of any kind, likewise
        raise ModelError(
            f"transformers makes no model of {folder / 'config.json'}: {_brief(error)}."
        ) from None


def weights_in(folder: Path, model: nn.Sequential) -> dict[str, Any] | None:
    """Return, by name in `model` (of `model_in`), slices of safetensors files; None without weights.

    The files are those that transformers would read. No tensor is read before `parallelize` asks for it.
    ModelError for files that are missing or damaged, for weights in another format, and for those that do not
    fit `config.json`.
    """
    _transformers()
    from safetensors import safe_open

    file_of = files_of_tensors(folder)
    if not file_of:
        return None
    opened = {name: safe_open(folder / name, framework="pt") for name in sorted(set(file_of.values()))}
    names: dict[str, str] = model.huggingface_names  # type: ignore[assignment]
    found, used = {}, set()
    for name, full in names.items():
        body = full.partition(".")[2]  # how models were saved before they had a head
        older = full.replace("lm_head.", "embed_out.")  # how GPT-NeoX calls it in files
        key = next((key for key in (full, body, older) if key in file_of), None)
        if key is not None:
            found[name] = opened[file_of[key]].get_slice(key)
            used.add(key)
    unused = [key for key in file_of if key not in used and not key.endswith(NO_WEIGHTS)]
    _require_fit(folder, model, found, unused)
    return found


def _require_fit(folder: Path, model: nn.Sequential, found: Mapping[str, Any], unused: list[str]) -> None:
    """ModelError unless the files have each parameter in its shape, under one of its names, and no others."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    there = {id(one) for name, one in parameters.items() if name in found}
    flaws = [f"{name} is missing" for name, one in model.named_parameters() if id(one) not in there]
    flaws += [
        f"{name} is {list(one.get_shape())} and not {list(parameters[name].shape)}"
        for name, one in found.items()
        if list(one.get_shape()) != list(parameters[name].shape)
    ]
    flaws += [f"{key} is unexpected" for key in unused]
    if flaws:
        raise ModelError(
            f"the weights in {folder} do not fit its config.json "
            f"({listed(flaws, between='; ', most=_MOST_TOLD)}): give a folder that is whole."
        )


def _config(folder: Path) -> Any:
    transformers = _transformers()
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any kind: what transformers meets in a file that it does not expect
        raise ModelError(
            f"{folder / 'config.json'} describes no model of transformers: {_brief(error)}."
        ) from None


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_OF_A_REASON].rstrip(".") or type(error).__name__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"a model of Hugging Face in a folder needs transformers ({error}): install plait[huggingface]."
        ) from None
    return transformers
