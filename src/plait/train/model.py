"""The model that a configuration describes."""

from __future__ import annotations

from torch import nn

from plait.models import gpt2, llama
from plait.train.sections import ModelConfig


def build_model(model: ModelConfig, vocab: int) -> nn.Sequential:
    """The model that `model` describes, for `vocab` tokens, on the meta device."""
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
