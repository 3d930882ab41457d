"""The number formats that a plan asks for, read from the plan alone: nothing of the engine decides here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.layers.precision import DTYPES
from plait.plan import Plan

INITIAL_LOSS_SCALE = 2.0**16
"""Of a dynamic loss scale (Micikevicius et al. 2017, arXiv:1710.03740)."""
GROWTH_INTERVAL = 2000
"""Steps with finite gradients, after which a dynamic loss scale is doubled."""


@dataclass(frozen=True)
class NumberFormats:
    """What numbers are stored in and how the loss is scaled. A dtype of None is the parameter's own."""

    compute: torch.dtype | None = None
    """Of parameters as layers use them, and of activations."""
    master: torch.dtype | None = None
    """Of parameters as the optimizer updates them."""
    gradient: torch.dtype | None = None
    """In which a rank adds gradients up."""
    reduce: torch.dtype | None = None
    """In which gradients travel between ranks."""
    loss_scale: float | None = None
    """None: dynamic where gradients may overflow, else 1."""

    @property
    def narrow(self) -> bool:
        """Whether anything is in 16 bits."""
        kinds = (self.compute, self.master, self.gradient, self.reduce)
        return any(kind is not None and kind.itemsize <= 2 for kind in kinds)

    def compute_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype that layers compute with."""
        return _or(self.compute, parameter.dtype, parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype that the optimizer updates; a frozen parameter has that of the layers."""
        own = self.compute_of(parameter)
        return _or(self.master, own, parameter) if parameter.requires_grad else own

    def gradient_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype that a gradient is added up in."""
        return _or(self.gradient, self.master_of(parameter), parameter)

    def reduce_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype that a gradient travels in."""
        return _or(self.reduce, self.gradient_of(parameter), parameter)

    def epsilon_of_gradient(self, parameter: nn.Parameter) -> float:
        """The largest machine epsilon of the dtypes that a final gradient has passed through."""
        passed = (self.gradient_of(parameter), self.reduce_of(parameter), self.master_of(parameter))
        return max(epsilon_of(dtype) for dtype in passed)

    def may_overflow(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient is computed, added up or sent in fp16."""
        kinds = (self.compute_of(parameter), self.gradient_of(parameter), self.reduce_of(parameter))
        return parameter.requires_grad and torch.float16 in kinds


def formats_of(plan: Plan) -> NumberFormats:
    """The formats of `plan`."""
    return NumberFormats(
        compute=DTYPES[plan.precision],
        master=DTYPES[plan.master_precision],
        gradient=DTYPES[plan.gradient_precision],
        reduce=DTYPES[plan.reduce_precision],
        loss_scale=plan.loss_scale,
    )


def epsilon_of(dtype: torch.dtype) -> float:
    """The machine epsilon of a dtype; 0 of whole numbers."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def _or(told: torch.dtype | None, otherwise: torch.dtype, parameter: Tensor) -> torch.dtype:
    return otherwise if told is None or not parameter.is_floating_point() else told


@dataclass
class ReferenceLossScale:
    """The loss scale of a step, and what becomes of it."""

    value: float = 1.0
    dynamic: bool = False
    finite_steps: int = GROWTH_INTERVAL - 1
    """Begins one step before a dynamic scale grows, so that a verification sees it grow."""

    def update(self, *, finite: bool) -> None:
        """A step is done, with gradients that were finite or not."""
        if not self.dynamic:
            return
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.finite_steps == GROWTH_INTERVAL:
            self.value, self.finite_steps = self.value * 2, 0
