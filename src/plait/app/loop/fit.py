"""`fit`: train a model by a plan, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.app.data.batches import Batches
from plait.app.loop.learning_rate_schedules import LearningRate, warmup_constant
from plait.app.loop.report_callback import Report
from plait.app.loop.stream import Stream
from plait.app.loop.training_loop import Callback, TrainingLoop, uneven_epochs
from plait.app.loop.validation import LowestLoss, Metric, Validation
from plait.engine.engine import Engine
from plait.engine.parallelize import parallelize
from plait.errors import ConfigError
from plait.optimizers.muon import Muon
from plait.optimizers.optimizer_makers import MakeOptimizer, class_of, optimizer_for
from plait.plan.argument_checks import require_instance, require_number, require_whole, whole
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy
from plait.tensor.torch_losses import GivenLoss

MakeGroups = Callable[[Engine], list[dict[str, Any]]]
"""Makes parameter groups of an engine's parameters."""


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`; the numbers are the same on every rank."""

    steps: int
    """Number of finished steps, including steps before the run was resumed."""
    loss: float
    """Loss of the last step; NaN where a resumed run had no steps left."""
    validation_loss: float | None
    """Latest validation loss, of the first of several; None without `validation`, or if a callback ended the
    run before the first."""
    validation_losses: Mapping[str, float | None]
    """Latest loss of each validation, by name; that of a single one without a name is called ""."""
    lowest: LowestLoss | None
    """The lowest validation loss, of the first of several, and the step after which it was measured."""
    stopped: bool
    """Whether a callback ended the run before its last step."""
    engine: Engine
    optimizer: torch.optim.Optimizer


def fit(
    model: nn.Module,
    plan: Plan,
    batches: Batches | Stream,
    *,
    steps: int,
    loss: GivenLoss = cross_entropy,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    learning_rate: float | LearningRate | None = None,
    weight_decay: float | None = None,
    clip: float = math.inf,
    validation: Batches | Mapping[str, Batches] | None = None,
    validate_every: int = 0,
    validate_batches: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    parameter_groups: MakeGroups | None = None,
    notes: str = "",
    mesh: Mesh | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    values: Mapping[str, Tensor] | None = None,
    broadcast: bool = False,
) -> FitResult:
    """Train `model` by `plan` for `steps` steps; every rank of `plan.world` calls it with the same arguments.

    `batches`: a `plait.Loader`, a `plait.Stream`, whose end may end the run earlier, or what has a `size`,
    the rows of a global batch, and `batch(step, rows)`, which returns inputs and targets of some rows.
    `optimizer` makes one of parameter groups, of which matrices have `weight_decay` and vectors have none; if
    of `plait.Muon` or `plait.Owned`, of engine and groups. `learning_rate`: a number, or a function of the
    step, from 0, such as `plait.loop.warmup_cosine`. None: the optimizer's. `clip`: the largest norm.

    The mean loss over `validation`, of which each row counts once, and the means of `metrics`, functions of
    the model's output and the targets that return a value for each row or token, are computed every
    `validate_every` steps (0: only then) and at the end. `validate_batches`: of only so many first batches.
    A dictionary of `validation` data by name gives a loss for each: `validation_NAME_loss`. `callbacks` are
    those of `plait.loop` for progress, logs, checkpoints and more. `parameter_groups`: a function of the
    engine that makes the optimizer's groups, such as a `partial` of `plait.loop.parameter_groups`, in place
    of those of `weight_decay`; `learning_rate` is multiplied by `lr_scale` of a group. `notes`: for the page
    of a `Report`. `mesh`: by default a new one of `plan`. Others are those of `parallelize`.

    Raises `ConfigError` for arguments that contradict each other, `DataError` where the data-parallel ranks
    cannot share a batch equally, `NonFiniteError` on every rank where a loss or gradient norm is not finite,
    and the errors of `parallelize`.
    """
    require_instance("plan", plan, Plan, "give a plait.Plan")
    steps, seed = whole("steps", steps), whole("seed", seed, least=0)
    rate = _of_step(learning_rate)
    _require_arguments(learning_rate, weight_decay, clip, optimizer, callbacks)
    _require_used(parameter_groups, weight_decay, notes, callbacks)
    validations = _validations(validation, validate_every, validate_batches, metrics)
    mesh = Mesh(plan) if mesh is None else mesh
    engine = parallelize(model, plan, mesh, loss, rules=rules, seed=seed, values=values, broadcast=broadcast)
    made = _made(optimizer, engine, parameter_groups, weight_decay)
    run = TrainingLoop(engine, made, batches, steps=steps, learning_rate=rate, clip=clip)
    run.notes = notes
    if line := uneven_epochs(run.batches, steps):
        run.tell(line)
    run.run([*validations, *callbacks])
    return _result(run, validations)


def _result(run: TrainingLoop, validations: Sequence[Validation]) -> FitResult:
    """Return the result of a run that has ended."""
    first = validations[0] if validations else Validation(None)
    return FitResult(
        steps=run.done,
        loss=run.row["loss"],
        validation_loss=first.loss,
        validation_losses={one.name: one.loss for one in validations},
        lowest=first.lowest,
        stopped=bool(run.stopped),
        engine=run.engine,
        optimizer=run.optimizer,
    )


def _validations(
    given: Batches | Mapping[str, Batches] | None,
    every: int,
    count: int | None,
    metrics: Mapping[str, Metric] | None,
) -> list[Validation]:
    """Return a validation of each of the `given` data. Raises `ConfigError` for arguments without data."""
    require_whole("validate_every", every, least=0)
    if metrics is not None:
        require_instance("metrics", metrics, Mapping, "give a dictionary of functions")
    if given is None:
        if every or count is not None or metrics:
            raise ConfigError(
                "validate_every, validate_batches or metrics are given, but no batches: give validation, too."
            )
        return []
    if count is not None:
        require_whole("validate_batches", count)
    named = given if isinstance(given, Mapping) else {"": given}
    if isinstance(given, Mapping) and (not named or "" in named):
        raise ConfigError("validation is a dictionary with no data, or with some of no name: name each.")
    return [
        Validation(batches, every=every, count=count, metrics=metrics, name=name)
        for name, batches in named.items()
    ]


def _of_step(learning_rate: float | LearningRate | None) -> LearningRate | None:
    """Return a learning rate as a function of the step. Raises `ConfigError` for another type."""
    if learning_rate is None or callable(learning_rate):
        return learning_rate
    require_number("learning_rate", learning_rate)
    return warmup_constant(float(learning_rate))


def _require_arguments(
    learning_rate: object, weight_decay: object, clip: object, optimizer: object, callbacks: object
) -> None:
    """Raise `ConfigError` for another type than asked for, or a number out of range."""
    if weight_decay is not None:
        require_number("weight_decay", weight_decay)
    require_number("clip", clip, positive=True, infinite="no clipping")
    require_instance("callbacks", callbacks, Sequence, "give a list of callbacks")
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer is an object of {type(optimizer).__name__}: give its class, or a function of "
            "parameter groups, such as functools.partial(torch.optim.AdamW, betas=(0.9, 0.95))."
        )
    _refuse_twice("weight_decay", weight_decay, "weight_decay", optimizer)
    _refuse_twice("learning_rate", learning_rate, "lr", optimizer)


def _require_used(
    make_groups: object, weight_decay: object, notes: object, callbacks: Sequence[Callback]
) -> None:
    """Raise `ConfigError` for groups, a decay or notes that nothing would use."""
    if make_groups is not None and not callable(make_groups):
        raise ConfigError(
            f"parameter_groups is an object of {type(make_groups).__name__}: give a function of the engine, "
            "such as functools.partial(plait.loop.parameter_groups, rates=[…])."
        )
    if make_groups is not None and weight_decay is not None:
        raise ConfigError(
            f"weight_decay is {weight_decay}, and parameter_groups sets it for each group: leave one of them "
            "out."
        )
    require_instance("notes", notes, str, "give a text")
    if notes and not any(isinstance(one, Report) for one in callbacks):
        raise ConfigError(
            "notes are given, but no callback shows them: add plait.loop.Report(folder) to callbacks."
        )


def _made(
    make: MakeOptimizer, engine: Engine, make_groups: MakeGroups | None, weight_decay: float | None
) -> torch.optim.Optimizer:
    """Return the optimizer that `make` makes. Raises `ConfigError` where it returns something else."""
    groups = engine.parameter_groups(weight_decay) if make_groups is None else make_groups(engine)
    if class_of(make) is Muon and weight_decay is not None:
        given = make.keywords.get("others") if isinstance(make, partial) else None
        if given is None or "weight_decay" not in given:
            groups = [{**one, "others": {"weight_decay": one["weight_decay"]}} for one in groups]
    made = optimizer_for(engine, make, groups)
    require_instance("what optimizer returns", made, torch.optim.Optimizer, "return one of torch.optim")
    engine.check_optimizer(made)
    return made


def _refuse_twice(name: str, value: object, option: str, optimizer: object) -> None:
    """Raise `ConfigError` for an option that fit and a `partial` of an optimizer set differently."""
    set_there = optimizer.keywords.get(option) if isinstance(optimizer, partial) else None
    if value is not None and not callable(value) and set_there not in (None, value):
        raise ConfigError(
            f"{name} is {value}, and the optimizer is given {option} = {set_there}: leave one of them out."
        )
