"""`Trainer`: the training loop of a configuration, on one rank, and the objects that it builds for it.

Read this file, and `plait.app.loop.training_loop`, to see how plait is used.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.app.config.config import Config
from plait.app.config.model_section import ModelConfig
from plait.app.config.train_section import TrainConfig
from plait.app.data.batches import rank_rows
from plait.app.data.tokenizer import Tokenizer, printable
from plait.app.loop.learning_rate_schedules import (
    LearningRate,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from plait.app.loop.meter import flops_per_token
from plait.app.loop.parameter_rates import SCALE, ParameterRate, freeze, parameter_groups, require_matches
from plait.app.loop.training_loop import TrainingLoop
from plait.app.train.run_data import Data, Prompt, encode_prompt
from plait.engine.engine import Engine
from plait.engine.parallelize import parallelize
from plait.engine.resharding.reshard_kept import reshard_kept
from plait.errors import ModelError
from plait.estimate.measurement.measured_balance import balance
from plait.models.gpt2 import gpt2_of
from plait.models.huggingface.pretrained import model_in, weights_in
from plait.models.llama import llama_of
from plait.models.lora import adapter_values, lora
from plait.models.peft_files import load_adapter, values_in
from plait.optimizers.muon import Muon
from plait.optimizers.optimizer_makers import MakeOptimizer, optimizer_for
from plait.optimizers.owned_optimizer import Owned
from plait.plan.plan import Plan
from plait.ranks.mesh import Mesh
from plait.tensor.dtypes import DTYPES
from plait.tensor.experts.balance_experts import balance_experts
from plait.tensor.losses import cross_entropy

_FUSED = ("AdamW", "Adam", "SGD")
"""Optimizers of which torch has a single kernel for all parameters, on the CPU too."""
TEMPERATURE = 0.8
"""Of samples."""


def build_model(model: ModelConfig, vocab: int) -> nn.Sequential:
    """Return the model that `model` configures, for `vocab` tokens, on the meta device.

    A model in a folder has its own vocabulary. Raises `ModelError` for one that plait does not support.
    """
    if model.folder is not None:
        built = model_in(model.folder, model.context)
    else:
        sizes = model.decoder(vocab)
        built = gpt2_of(sizes) if sizes.family == "gpt2" else llama_of(sizes)
    settings = model.lora
    if settings.adapter is not None:
        load_adapter(built, Path(settings.adapter).expanduser())
    elif settings.adapts:
        rank, alpha, dropout = settings.rank, settings.alpha, settings.dropout
        lora(built, rank=rank, alpha=alpha, targets=settings.targets, dropout=dropout)
    return built


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


def model_to_train(config: Config, vocab: int) -> nn.Sequential:
    """Return the configured model, with parameters frozen and router settings as the section `train` says."""
    model = build_model(config.model, vocab)
    freeze(model, config.train.freeze, "train.freeze")
    if options := config.train.balance_options():
        balance_experts(model, **options)
    trained = [name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad]
    require_matches((one.pattern for one in config.train.rates), trained, "train.rates")
    return model


def plan_with_measured_cut(config: Config, plan: Plan, mesh: Mesh, data: Data) -> Plan:
    """Return the plan; if `parallel.balance` asks, with layers cut into stages by times measured here."""
    if config.parallel.balance == "counted" or plan.layers_per_stage is not None:
        return plan
    rows = rank_rows(mesh.index("dp"), mesh.size("dp"), config.train.batch)
    inputs, targets = data.training.batch(0, rows)
    return balance(model_to_train(config, data.vocab), plan, mesh, inputs, targets)


def optimizer_maker(settings: TrainConfig) -> MakeOptimizer:
    """Return a function that makes the configured optimizer; parameter groups set weight decay."""
    name, options = settings.optimizer.name, settings.optimizer_options()
    if name != "Muon":
        kind, owned = getattr(torch.optim, name), options.pop("owned", False)
        fused = {"fused": True} if name in _FUSED else {}
        made = partial(Owned, kind) if owned else kind
        return partial(made, lr=settings.lr, **options, **fused)
    others: dict[str, Any] = {option: options.pop(option) for option in ("betas", "eps") if option in options}
    others |= {"lr": options.pop("others_lr", settings.lr), "weight_decay": settings.matrix_decay}
    dtype = DTYPES[options.pop("iterations", "bf16")]
    assert dtype is not None
    scaling = options.pop("adjust_lr_fn", "match_rms_adamw")
    return partial(Muon, lr=settings.lr, others=others, dtype=dtype, adjust_lr_fn=scaling, **options)


def run_groups(engine: Engine, settings: TrainConfig) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups of a run: with `train.rates`, one or two per pattern."""
    rates = [
        ParameterRate(one.pattern, one.scale_of(settings.lr), one.weight_decay) for one in settings.rates
    ]
    if not rates and settings.optimizer.name != "Muon":
        return engine.parameter_groups(weight_decay=settings.matrix_decay)
    groups = parameter_groups(engine, rates, settings.matrix_decay)
    if settings.optimizer.name == "Muon":  # the run sets one learning rate, of which groups have factors
        factor = (settings.optimizer.others_lr or settings.lr) / settings.lr
        for group in groups:
            decay, scale = group["weight_decay"], group[SCALE] * factor
            group["others"] = {"lr": settings.lr, "weight_decay": decay, SCALE: scale}
    return groups


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


class Trainer(TrainingLoop):
    """Trains `config.model` on `data` over `mesh` by `plan`. Every rank makes one with the same arguments."""

    def __init__(self, config: Config, plan: Plan, mesh: Mesh, data: Data) -> None:
        settings, shape = config.train, config.model
        model = model_to_train(config, data.vocab)
        parameters = [(one.numel(), one.requires_grad) for one in model.parameters()]
        self.sizes = sum(size for size, _ in parameters), sum(size for size, trains in parameters if trains)
        """The number of parameters of the whole model, and of those that are not frozen."""
        values = initial_weights(shape, model, settings.seed)
        self.has_weights = values is not None
        make = optimizer_maker(settings)
        moved = reshard_kept(lambda: model, make, plan, mesh, loss=cross_entropy)
        if moved is None:
            engine = parallelize(model, plan, mesh, loss=cross_entropy, seed=settings.seed, values=values)
            moved = engine, optimizer_for(engine, make, run_groups(engine, settings))
        engine, optimizer = moved
        engine.check_optimizer(optimizer)
        super().__init__(
            engine,
            optimizer,
            data.training,
            steps=settings.steps,
            learning_rate=build_learning_rate(settings),
            clip=settings.clip or math.inf,
            flops_per_token=flops_per_token(
                model, layers=shape.layers, hidden=shape.hidden, context=shape.context
            ),
            advice="lower train.lr, raise train.warmup",
        )
        self._config, self._data = config, data

    def sample(self) -> str | None:
        """Return a continuation of the prompt `train.sample`; None without one or without a text tokenizer.

        Every rank calls it and gets the same text. Communication: that of `Engine.generate`.
        """
        data = self._data
        if not self._config.train.sample:
            return None
        if data.unreadable:
            self.tell(f"No sample: {data.unreadable}.")
            return None
        prompt = encode_prompt(self._config, data.tokenizer, is_question=data.holds_chats)
        return sample_text(self.engine, self._config, data.tokenizer, prompt) if prompt.tokens else None


def sample_text(engine: Engine, config: Config, tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Return `train.sample` and its continuation, or the answer to it; called by every rank."""
    settings = config.train
    start = torch.tensor([prompt.tokens], dtype=torch.int64, device=engine.mesh.device)
    tokens = engine.generate(
        start, settings.sample_tokens, temperature=TEMPERATURE, seed=settings.seed, stop=prompt.stop
    )[0].tolist()
    if prompt.is_question:
        return printable(f"{settings.sample}\n{tokenizer.decode(tokens[len(prompt.tokens) :])}")
    return printable(tokenizer.decode(tokens))
