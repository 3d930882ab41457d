"""The same through plait: what runs in each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

import plait
from parity.case import ROWS, SEED, WEIGHT_DECAY, Batch, Case, Recipe, rows_of
from parity.outcome import Outcome
from plait.engine import Engine
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.plan import Plan

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
Defect = Callable[[], AbstractContextManager[object]]
"""Breaks plait while it is entered (see `defects`)."""


def global_rows(plan: Plan) -> int:
    """Of the global batch that a plan is given."""
    return ROWS * plan.microbatches * plan.dp


def weave(case: Case, plan: Plan) -> Engine:
    """The case's engine on this rank."""
    return plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)


def shares(case: Case, engine: Engine, count: int) -> list[Batch]:
    """This data-parallel rank's rows of `count` global batches."""
    plan = engine.plan
    rows = ROWS * plan.microbatches
    first = engine.mesh.index("dp") * rows
    whole = case.batches(global_rows(plan), count, DTYPES[plan.precision])
    return [
        (rows_of(inputs, first, first + rows), rows_of(targets, first, first + rows))
        for inputs, targets in whole
    ]


def train(case: Case, plan: Plan, recipe: Recipe, defect: Defect = nullcontext) -> Outcome:
    """Carry out `recipe`; everything of plait runs within `defect`."""
    with defect():
        return carry_out(recipe, weave(case, plan), case)


def carry_out(recipe: Recipe, engine: Engine, case: Case) -> Outcome:
    """Train the engine on the case's data."""
    spoil_gradients(engine)
    optimizer = recipe.make_optimizer(engine.parameter_groups(WEIGHT_DECAY))
    outcome = Outcome(coordinate=engine.mesh.coordinate, layouts=dict(engine.layouts))
    batches = iter(shares(case, engine, recipe.steps * recipe.calls))
    for step in range(recipe.steps):
        for _ in range(recipe.calls):
            outcome.losses.append(engine.forward_backward(*next(batches)).item())
        if step == 0:
            outcome.gradients = gradients_of(engine)
        outcome.norms.append(engine.clip_grad_norm_(recipe.clip).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
    outcome.parameters = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return outcome


def spoil_gradients(engine: Engine) -> None:
    """From now on put NaN into a whole gradient when it begins: it stays where nothing is written."""
    reducer = engine._runner.reducer
    started = reducer._started

    def spoiled(name: str) -> list[Tensor]:
        for buffer in reducer.units[name].trainable:
            for gradient in buffer.whole_gradients:
                gradient.fill_(torch.nan)
        return started(name)

    reducer._started = spoiled  # type: ignore[method-assign]


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """The gradients of this rank's trainable parameters by full name."""
    gradients = {}
    for name, parameter in engine.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[name] = parameter.grad.clone()
    return gradients


@cache
def layer_count(case: Case) -> int:
    """How many layers plait sees in the case's model."""
    return len(sequence_of(case.build()).layers)
