"""Build the objects of a configuration: model, initial weights, optimizer and its groups, learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.app.config.config import Config
from plait.app.config.config_sections import ModelConfig
from plait.app.config.train_section import TrainConfig
from plait.app.loop.learning_rates import (
    LearningRate,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from plait.app.loop.parameter_rates import ParameterRate, freeze, parameter_groups, require_matches
from plait.engine.engine import Engine
from plait.errors import ModelError
from plait.models.gpt2 import gpt2_of
from plait.models.huggingface.pretrained import model_in, weights_in
from plait.models.llama import llama_of
from plait.models.lora import adapter_values, lora
from plait.models.peft_files import load_adapter, values_in

_FUSED = ("AdamW", "Adam", "SGD")
"""Optimizers of which torch has a single kernel for all parameters, on the CPU too."""


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
    sizes = model.decoder(vocab)
    return gpt2_of(sizes) if sizes.family == "gpt2" else llama_of(sizes)


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


def trained_part(config: Config, vocab: int) -> nn.Sequential:
    """Return the model that `build_model` makes, with the parameters named by `train.freeze` frozen.

    Raises ConfigError for a pattern of `train.freeze` or `train.rates` that fits no parameter.
    """
    model = build_model(config.model, vocab)
    freeze(model, config.train.freeze, "train.freeze")
    trained = [name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad]
    require_matches((one.pattern for one in config.train.rates), trained, "train.rates")
    return model


def build_optimizer(groups: list[dict[str, Any]], settings: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `settings` name; the parameter groups set their own weight decay."""
    name = settings.optimizer.name
    make = getattr(torch.optim, name)
    fused = {"fused": True} if name in _FUSED else {}
    made: torch.optim.Optimizer = make(groups, lr=settings.lr, **settings.optimizer_options(), **fused)
    return made


def run_groups(engine: Engine, settings: TrainConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of a run: those of the engine, or with rates by pattern."""
    if not settings.rates:
        return engine.parameter_groups(weight_decay=settings.matrix_decay)
    rates = [
        ParameterRate(one.pattern, one.scale_of(settings.lr), one.weight_decay) for one in settings.rates
    ]
    return parameter_groups(engine, rates, settings.matrix_decay)


def build_learning_rate(settings: TrainConfig) -> LearningRate:
    """Return the learning rate over the steps, as `train.schedule` names it."""
    peak, steps, warmup, floor = settings.lr, settings.steps, settings.warmup, settings.lowest_lr
    kind = settings.schedule.name
    if kind == "constant":
        return warmup_constant(peak, warmup=warmup)
    if kind == "wsd":
        decay = settings.schedule.decay
        return warmup_stable_decay(peak, steps=steps, warmup=warmup, decay=decay, floor=floor)
    schedule = warmup_linear if kind == "linear" else warmup_cosine
    return schedule(peak, steps=steps, warmup=warmup, floor=floor)
