"""Build the objects of a configuration: the model, its initial weights, the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.models import gpt2, llama
from plait.models.huggingface.pretrained import model_in, weights_in
from plait.models.low_rank_adaptation import adapter_values, lora
from plait.models.peft_adapters import load_adapter, values_in
from plait.train.config_sections import ModelConfig, TrainConfig


def build_model(model: ModelConfig, vocab: int) -> nn.Sequential:
    """Return the model that `model` configures, for `vocab` tokens, on the meta device.

    A model in a folder has its own vocabulary. Raises `ModelError` for one that plait does not support.
    """
    built, settings = _without_adapters(model, vocab), model.lora
    if settings.adapter is not None:
        load_adapter(built, Path(settings.adapter).expanduser())
    elif settings.adapts:
        rank, alpha, dropout = settings.rank, settings.alpha, settings.dropout
        lora(built, rank=rank, alpha=alpha, targets=settings.targets, dropout=dropout)
    return built


def _without_adapters(model: ModelConfig, vocab: int) -> nn.Sequential:
    if model.folder is not None:
        return model_in(model.folder, model.context)
    sizes = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "vocab": vocab,
        "context": model.context,
    }
    if model.name == "gpt2":
        return gpt2(**sizes, tied=model.is_tied)
    return llama(**sizes, kv_heads=model.kv_heads, inner=model.inner, tied=model.is_tied)


def initial_weights(config: ModelConfig, model: nn.Sequential, seed: int) -> dict[str, Any] | None:
    """Return the weights in the folder `model.name` by their names in `model`, or None if there are none.

    With the values of its adapters: those in their folder, else those of `seed`. Raises ModelError for an
    adapter of a model without weights.
    """
    weights = None if config.folder is None else weights_in(config.folder, model)
    if weights is None and config.lora.adapter is not None:
        raise ModelError(
            f"{config.name} holds no weights, and model.lora.adapter = {config.lora.adapter!r} was trained "
            "beside those of a model: give a folder with weights, or leave the adapter out."
        )
    if weights is None or not config.lora.adapts:
        return weights
    adapter = config.lora.adapter
    values = adapter_values(model, seed) if adapter is None else values_in(model, Path(adapter).expanduser())
    return {**weights, **values}


def build_optimizer(groups: list[dict[str, Any]], settings: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW with the options in `settings`; the parameter groups set their own weight decay."""
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
