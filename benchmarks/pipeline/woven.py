"""plait's side: the step of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from work import LIMIT, MICROBATCHES, Step, batch, build, optimizer_of

import plait
from plait.engine import Engine
from plait.estimate.measurement.measured_balance import balance

REORDERED_AFTER = 2
"""Steps."""


def measured_cut(schedule: str, ranks: int, microbatches: int = MICROBATCHES) -> tuple[int, ...]:
    """Layers per stage, by what layers take on these ranks: for plait's stages and PyTorch's alike."""
    plan = plait.Plan(pp=ranks, microbatches=microbatches, schedule=schedule)
    mesh = plait.Mesh(plan, device="cpu")
    found = balance(build(), plan, mesh, *batch(0, microbatches)).layers_per_stage
    mesh.close()
    assert found is not None
    return found


def weave(schedule: str, ranks: int, *, microbatches: int = MICROBATCHES, **choices: Any) -> Engine:
    """The model on this rank, by a schedule of plait; `choices` are others of the plan."""
    plan = plait.Plan(pp=ranks, microbatches=microbatches, schedule=schedule, **choices)
    mesh = plait.Mesh(plan, device="cpu")
    return plait.parallelize(build(), plan, mesh, loss=plait.cross_entropy)


def train(engine: Engine) -> Step:
    """What takes a step. `auto` searches its order anew after the first steps, from what actions took."""
    optimizer: torch.optim.Optimizer = optimizer_of(engine.parameters())
    taken = 0

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        loss = engine.forward_backward(inputs, targets)
        engine.step(optimizer, LIMIT)
        optimizer.zero_grad()
        return loss

    def recorded(inputs: Tensor, targets: Tensor) -> Tensor:
        if engine.plan.schedule != "auto" or taken + 1 != REORDERED_AFTER:
            return step(inputs, targets)
        with engine.recording() as recording:
            loss = step(inputs, targets)
        engine.reorder(recording.costs())
        return loss

    return recorded
