"""The model that a configuration describes."""

from __future__ import annotations

from typing import Any

from torch import nn

from plait.models import gpt2, llama
from plait.models.huggingface.folder import model_in, weights_in
from plait.train.sections import ModelConfig


def weights_of(config: ModelConfig, model: nn.Sequential) -> dict[str, Any] | None:
    """The values that `model`, as `build_model` makes it, starts from; None: those of the seed."""
    return None if config.folder is None else weights_in(config.folder, model)


def build_model(model: ModelConfig, vocab: int) -> nn.Sequential:
    """The model that `model` describes, for `vocab` tokens, on the meta device.

    One in a folder has its own vocabulary. ModelError for one that plait does not know.
    """
    if model.folder is not None:
        return model_in(model.folder)
    sizes = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "vocab": vocab,
        "context": model.context,
    }
    if model.name == "gpt2":
        return gpt2(**sizes, tied=model.tied)
    return llama(**sizes, kv_heads=model.kv_heads, inner=model.inner, tied=model.tied)
