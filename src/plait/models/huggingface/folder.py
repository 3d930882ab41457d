"""Models that lie in a folder, as `save_pretrained` of transformers leaves them: sizes, layers, weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.models.huggingface.adapter import FAMILIES, from_huggingface


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
        return Sizes(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            context=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )
    except AttributeError as error:
        raise ModelError(
            f"{folder / 'config.json'} is that of a {type(config).__name__}, whose sizes plait cannot read "
            f"({error}): give the folder of one of {', '.join(FAMILIES)}."
        ) from None


def model_in(folder: Path) -> nn.Sequential:
    """The model in `folder` as layers on the meta device. ModelError as `from_huggingface`."""
    transformers = _transformers()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_config(folder))
    return from_huggingface(model)


def weights_in(folder: Path, model: nn.Sequential) -> dict[str, Any] | None:
    """By name in `model`, of `model_in`, a slice of a safetensors file; None where there are no weights.

    Nothing is read before `parallelize` asks for it. ModelError for weights in another format.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(folder.glob("pytorch_model*.bin"))
        if others:
            raise ModelError(
                f"the weights in {others[0]} are no safetensors: load the model with transformers and save "
                "it again with save_pretrained, or take the file away to train from values by the seed."
            )
        return None
    _transformers()
    from safetensors import safe_open

    held: dict[str, Any] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        held |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    names: dict[str, str] = model.huggingface_names  # type: ignore[assignment]
    found = {}
    for name, full in names.items():
        body = full.partition(".")[2]  # how models were saved before they had a head
        older = full.replace("lm_head.", "embed_out.")  # how GPT-NeoX calls it in files
        key = next((key for key in (full, body, older) if key in held), None)
        if key is not None:
            found[name] = held[key]
    return found


def _config(folder: Path) -> Any:
    transformers = _transformers()
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(f"{folder / 'config.json'} describes no model of transformers: {reason}.") from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"a model of Hugging Face in a folder needs transformers ({error}): install plait[huggingface]."
        ) from None
    return transformers
