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
from plait.loop.callbacks import Validation
from plait.loop.training import Callback, TrainingLoop
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
    learning_rate: float | Callable[[int], float] | None = None,
    weight_decay: float = 0.01,
    clip: float = math.inf,
    validation: Batches | None = None,
    validate_every: int = 0,
    validate_batches: int = 1,
    callbacks: Sequence[Callback] = (),
    mesh: Mesh | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    values: Mapping[str, Tensor] | None = None,
    broadcast: bool = False,
) -> FitResult:
    """Train `model` by `plan` for `steps` steps; every rank of `plan.world` calls it with the same arguments.

    `batches` have a `size`, the rows of a global batch, and `batch(step, rows)`, which returns inputs and
    targets of some rows: a `plait.Loader` of any dataset. `optimizer` makes one of parameter groups, of which
    matrices have `weight_decay` and vectors have none. `learning_rate`: a number, or a function of the step,
    counted from 0; None: the optimizer's own. `clip`: the largest gradient norm. The mean loss over the first
    `validate_batches` of `validation` is computed every `validate_every` steps (0: never) and at the end.
    `callbacks` are `plait.loop.callbacks` for logging, checkpoints and more. `loss`, `seed`, `rules`,
    `values` and `broadcast` are those of `parallelize`; `mesh` is by default a new one of `plan`.

    Raises `DataError` where the data-parallel ranks cannot share a batch equally, `NonFiniteError` on every
    rank where a loss or gradient norm is not finite, and the errors of `parallelize`.
    """
    mesh = Mesh(plan) if mesh is None else mesh
    engine = parallelize(model, plan, mesh, loss, rules=rules, seed=seed, values=values, broadcast=broadcast)
    rate = learning_rate if callable(learning_rate) or learning_rate is None else _constant(learning_rate)
    groups = engine.parameter_groups(weight_decay)
    run = TrainingLoop(engine, optimizer(groups), batches, steps=steps, learning_rate=rate, clip=clip)
    validate = None
    if validation is not None:
        validate = Validation(validation, every=validate_every, count=validate_batches)
    run.run([*([] if validate is None else [validate]), *callbacks])
    return FitResult(
        steps=run.done,
        loss=run.row["loss"],
        validation_loss=None if validate is None else validate.loss,
        stopped=bool(run.stopped),
        engine=engine,
        optimizer=run.optimizer,
    )


def _constant(rate: float) -> Callable[[int], float]:
    return lambda step: rate
