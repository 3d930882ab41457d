"""Comparison of a run's first steps with the same steps on a single rank (`run.compare`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.app.config.config import Config
from plait.app.train.run_data import Data
from plait.app.train.trainer import Trainer
from plait.plan.plan import Plan, Precision
from plait.ranks.collectives import all_reduce, barrier
from plait.ranks.mesh import Mesh

# Largest relative difference that rounding explains, by precision; of linears in float8 that of bf16, since a
# last bit at the border of two numbers of eight bits decides between them.
_TOLERANCE: dict[Precision, float] = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 1e-2, "bf16": 2e-2}

LossAndNorm = tuple[float, float]
"""Loss and gradient norm of one step."""


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences of loss and gradient norm from one rank, in the first `steps` of a run."""

    steps: int
    loss: float
    grad_norm: float
    tolerance: float

    @property
    def matches(self) -> bool:
        """Whether the differences in loss and gradient norm are at most `tolerance`, as rounding explains."""
        return self.loss <= self.tolerance and self.grad_norm <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        steps = "first step" if self.steps == 1 else f"first {self.steps} steps"
        numbers = f"loss to {self.loss:.1e}, gradient norm to {self.grad_norm:.1e} (relative)"
        if self.matches:
            return f"The {steps} match{'es' if self.steps == 1 else ''} one rank: {numbers}."
        verb = "does" if self.steps == 1 else "do"
        return f"The {steps} {verb} NOT match one rank: {numbers}, beyond {self.tolerance:g}."


def compare_steps(config: Config, data: Data, mesh: Mesh, steps: Sequence[LossAndNorm]) -> Comparison:
    """Repeat the first steps of a run on rank 0 alone, and compare losses and norms with `steps`.

    Every rank calls it and gets the same result. Communication: a barrier after each step, so that ranks
    wait for one step at most, and two numbers all-reduced over the world.
    """
    world = mesh.group("world")
    reference = None
    if mesh.rank == 0:
        plan = single_rank_plan(config.plan())
        reference = Trainer(config, plan, Mesh(plan, device=mesh.device, alone=True), data)
    expected: list[LossAndNorm] = []
    for step in range(len(steps)):
        if reference is not None:
            expected.append(reference_step(reference, step))
        barrier(world, checked=False).wait()
    differences = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if reference is not None:
        differences.copy_(largest_differences(steps, expected))
    all_reduce(differences, world, "sum", checked=False).wait()
    loss_difference, norm_difference = differences.tolist()
    return Comparison(len(steps), loss_difference, norm_difference, _tolerance(config.plan()))


def _tolerance(plan: Plan) -> float:
    """Return the largest relative difference that the coarsest number format of the plan explains."""
    if plan.linears is not None:
        return max(_TOLERANCE.values())
    used = plan.precision, plan.master_precision, plan.gradient_precision, plan.reduce_precision
    return max(_TOLERANCE[precision] for precision in used if precision is not None)


def single_rank_plan(plan: Plan) -> Plan:
    """Return the single-rank plan with the micro-batches of all data-parallel ranks."""
    return Plan(
        microbatches=plan.dp * plan.microbatches,
        schedule=plan.schedule,
        precision=plan.precision,
        master_precision=plan.master_precision,
        gradient_precision=plan.gradient_precision,
        reduce_precision=plan.reduce_precision,
        loss_scale=plan.loss_scale,
        linears=plan.linears,
    )


def reference_step(trainer: Trainer, step: int) -> LossAndNorm:
    """Train a single rank on the batch of `step`, with PyTorch's clipping; return loss and gradient norm.

    `Engine.step` does not run here, so that a mistake in it changes the losses of later steps.
    """
    loss = trainer.forward_backward(step)
    norm = trainer.engine.clip_grad_norm_(math.inf)  # drops gradients that overflow a loss scale
    gradients = [p.grad for p in trainer.engine.parameters() if p.grad is not None]
    if gradients:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        norm = nn.utils.get_total_norm(norms)
    nn.utils.clip_grads_with_norm_(trainer.engine.parameters(), trainer.max_norm, norm)
    trainer.optimizer.step()
    return float(loss), float(norm)


def largest_differences(steps: Sequence[LossAndNorm], expected: Sequence[LossAndNorm]) -> Tensor:
    """Return the largest relative differences of losses and of gradient norms, `[2]`; NaN where one is NaN.

    Norms that overflow their loss scale in both are equal.
    """
    ours, theirs = (torch.tensor(results, dtype=torch.float64) for results in (steps, expected))
    scale = theirs.abs().clamp(min=torch.finfo(torch.float64).tiny)
    return ((ours - theirs).abs() / scale).where(ours != theirs, 0.0).amax(dim=0)
