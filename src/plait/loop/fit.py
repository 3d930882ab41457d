"""`fit`: train a model by a plan, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.composer import parallelize
from plait.data.batches import Batches
from plait.engine import Engine
from plait.errors import ConfigError
from plait.loop.learning_rates import LearningRate, constant
from plait.loop.training import Callback, TrainingLoop
from plait.loop.validation import LowestLoss, Metric, Validation
from plait.plan import Plan
from plait.rules import Rules
from plait.tensor.losses import cross_entropy
from plait.tensor.torch_losses import GivenLoss

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of parameter groups."""


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`; the numbers are the same on every rank."""

    steps: int
    """Number of finished steps, including steps before the run was resumed."""
    loss: float
    """Loss of the last step; NaN where a resumed run had no steps left."""
    validation_loss: float | None
    """Latest validation loss; None without `validation`."""
    lowest: LowestLoss | None
    """The lowest validation loss, and the step after which it was measured."""
    stopped: bool
    """Whether a callback ended the run before its last step."""
    engine: Engine
    optimizer: torch.optim.Optimizer


def fit(
    model: nn.Module,
    plan: Plan,
    batches: Batches,
    *,
    steps: int,
    loss: GivenLoss = cross_entropy,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    learning_rate: float | LearningRate | None = None,
    weight_decay: float = 0.01,
    clip: float = math.inf,
    validation: Batches | None = None,
    validate_every: int = 0,
    validate_batches: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    mesh: Mesh | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    values: Mapping[str, Tensor] | None = None,
    broadcast: bool = False,
) -> FitResult:
    """Train `model` by `plan` for `steps` steps; every rank of `plan.world` calls it with the same arguments.

    `batches`: a `plait.Loader`, or what has a `size`, the rows of a global batch, and `batch(step, rows)`,
    which returns inputs and targets of some rows. `optimizer` makes one of parameter groups, of which
    matrices have `weight_decay` and vectors have none. `learning_rate`: a number, or a function of the step,
    from 0, such as `plait.loop.warmup_cosine`; None: the optimizer's. `clip`: the largest gradient norm.

    The mean loss over the first `validate_batches` of `validation` (None: all samples of a `Loader` once),
    and the means of `metrics`, functions of the model's output and the targets that return a value for each
    row or token, are computed every `validate_every` steps (0: never) and at the end. `callbacks` are those
    of `plait.loop` for progress, logs, checkpoints and more. `loss`, `seed`, `rules`, `values` and
    `broadcast` are those of `parallelize`; `mesh` is by default a new one of `plan`.

    Raises `ConfigError` for arguments that contradict each other, `DataError` where the data-parallel ranks
    cannot share a batch equally, `NonFiniteError` on every rank where a loss or gradient norm is not finite,
    and the errors of `parallelize`.
    """
    if validation is None and (validate_every or metrics):
        raise ConfigError("validate_every or metrics are given, but no batches: give validation, too.")
    _require_function(optimizer)
    mesh = Mesh(plan) if mesh is None else mesh
    engine = parallelize(model, plan, mesh, loss, rules=rules, seed=seed, values=values, broadcast=broadcast)
    made = optimizer(engine.parameter_groups(weight_decay))
    rate = learning_rate if callable(learning_rate) or learning_rate is None else constant(learning_rate)
    run = TrainingLoop(engine, made, batches, steps=steps, learning_rate=rate, clip=clip)
    validate = Validation(validation, every=validate_every, count=validate_batches, metrics=metrics)
    run.run([validate, *callbacks])
    return FitResult(
        steps=run.done,
        loss=run.row["loss"],
        validation_loss=validate.loss,
        lowest=validate.lowest,
        stopped=bool(run.stopped),
        engine=engine,
        optimizer=made,
    )


def _require_function(optimizer: object) -> None:
    """Raise `ConfigError` for an optimizer that was made of parameters already."""
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer is an object of {type(optimizer).__name__}: give its class, or a function of "
            "parameter groups, such as functools.partial(torch.optim.AdamW, betas=(0.9, 0.95))."
        )
