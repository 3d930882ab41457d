"""Options of a verification: the mode, the steps, the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from plait.errors import PlanError
from plait.optimizers.muon import Muon
from plait.optimizers.optimizer_makers import MakeOptimizer, class_of, takes_engine
from plait.plan.argument_checks import require_flag, require_number, require_whole
from plait.plan.plan import Plan
from plait.verification.expected_dtypes import NumberFormats

Mode = Literal["exact", "float64", "native"]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate of 1e-3 and betas of 0.9 and 0.95."""
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def usual_steps(mode: Mode) -> int:
    """Return the default number of steps: 2, to compare state carried between steps; 1 in mode exact."""
    return 1 if mode == "exact" else 2


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of the reference run, the candidate run and their comparison; most are those of `plait.verify`.

    `perturbations`: how often the reference runs again with artificial rounding errors, which shows the
    differences that rounding explains. `resumes`: save the candidate, load it, and compare one more step; not
    in mode exact.
    """

    mode: Mode = "float64"
    steps: int = 2
    clip: float | None = None
    weight_decay: float = 0.1
    optimizer: MakeOptimizer = adamw
    """Makes the optimizer of two parameter groups with their weight decay: matrices, then vectors."""
    perturbations: int = 2
    isolate: bool = False
    resumes: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise PlanError(f"mode is {self.mode!r}: choose one of {', '.join(get_args(Mode))}.")
        for name, least in (("steps", 1), ("perturbations", 1), ("seed", 0)):
            require_whole(name, getattr(self, name), PlanError, least=least)
        require_flag("isolate", self.isolate, PlanError)
        if not callable(self.optimizer):
            raise PlanError(f"optimizer is {self.optimizer!r}: give a function of parameter groups.")
        if self.mode == "exact" and takes_engine(self.optimizer):
            raise PlanError(
                "mode exact compares bits, which sums in another order change in an optimizer of whole "
                "matrices: choose float64."
            )
        if self.mode == "exact" and self.steps != 1:
            raise PlanError(f"steps is {self.steps}: mode exact takes 1, as numbers grow too large after it.")
        if self.clip is not None:
            require_number("clip", self.clip, PlanError, positive=True, infinite="no limit")

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """The function that makes both runs' optimizers; Muon iterates in float64, except in mode native."""
        if self.mode != "native" and class_of(self.optimizer) is Muon:
            return partial(self.optimizer, dtype=torch.float64)
        return self.optimizer

    @property
    def norm_type(self) -> float:
        """The norm type of gradient clipping: in mode exact the maximum norm, which is an integer."""
        return math.inf if self.mode == "exact" else 2.0

    @property
    def resynchronizes(self) -> bool:
        """Whether each comparison of gradients and parameters also resets them to the reference's.

        In 16 bits gradients have a large tolerance, which all that is computed from them would inherit.
        """
        return self.mode == "native"

    @property
    def resumed_steps(self) -> int:
        """The number of steps that follow after the candidate was saved and loaded."""
        return int(self.resumes and self.mode != "exact")

    def perturbed_runs(self, formats: NumberFormats) -> int:
        """Return how many perturbed reference runs to make; more in 16 bits: optimizers amplify noise."""
        if self.mode == "exact":
            return 0
        return max(self.perturbations, 6) if formats.narrow else self.perturbations

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with the precision of the runs: in mode native the plan's own, else float64.

        In mode exact the loss is a sum of integers, which is not computed in chunks of rows.
        """
        if self.mode == "native":
            return plan
        return replace(
            plan,
            loss_rows=None if self.mode == "exact" else plan.loss_rows,
            precision="fp64",
            master_precision=None,
            gradient_precision=None,
            reduce_precision=None,
            loss_scale=None,
        )
