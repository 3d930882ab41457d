"""The dtypes and loss scale that a plan implies, from a table of the documented rules of `Plan`.

Independent of `plait.plan.parameter_units`, whose mistakes the verification is to find: that derives each
dtype from the one before, this lists for each the fields that may set it, and takes the first one given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.plan.plan import Plan
from plait.tensor.dtypes import DTYPES

INITIAL_LOSS_SCALE = 2.0**16
"""First value of a dynamic loss scale (Micikevicius et al. 2017, arXiv:1710.03740)."""
GROWTH_INTERVAL = 2000
"""Consecutive steps with finite gradients, after which a dynamic loss scale is doubled."""
SET_BY = {
    "compute": ("compute",),
    "master": ("master", "compute"),
    "gradient": ("gradient", "master", "compute"),
    "reduce": ("reduce", "gradient", "master", "compute"),
}
"""The fields of `NumberFormats` that set each dtype of a trainable parameter: the first one that is given, or
the dtype is the parameter's own. A plan always gives that of masters where `compute` has 16 bits."""


@dataclass(frozen=True)
class NumberFormats:
    """Dtypes of a run's layers, updates and gradients, and its loss scale. None: each parameter's own."""

    compute: torch.dtype | None = None
    """Dtype of activations, and of parameters as layers use them."""
    master: torch.dtype | None = None
    """Dtype of parameters as the optimizer updates them."""
    gradient: torch.dtype | None = None
    """Dtype in which a rank accumulates gradients."""
    reduce: torch.dtype | None = None
    """Dtype in which gradients are reduced between ranks."""
    loss_scale: float | None = None
    """None: dynamic where gradients may overflow, else 1."""

    @property
    def narrow(self) -> bool:
        """Whether any dtype has 16 bits."""
        kinds = (self.compute, self.master, self.gradient, self.reduce)
        return any(kind is not None and kind.itemsize <= 2 for kind in kinds)

    def compute_of(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which layers use `parameter`."""
        return self._first_given("compute", parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the optimizer's copy of `parameter`; if frozen, that in which layers use it."""
        return self._first_given("master", parameter)

    def gradient_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of `parameter` is accumulated."""
        return self._first_given("gradient", parameter)

    def reduce_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of `parameter` is reduced."""
        return self._first_given("reduce", parameter)

    def _first_given(self, which: str, parameter: Tensor) -> torch.dtype:
        """Return one of a parameter's dtypes by `SET_BY`; whole numbers keep theirs, frozen ones have one."""
        if not parameter.is_floating_point():
            return parameter.dtype
        fields = SET_BY[which if parameter.requires_grad else "compute"]
        given = (getattr(self, field) for field in fields)
        return next((dtype for dtype in given if dtype is not None), parameter.dtype)

    def epsilon_of_gradient(self, parameter: nn.Parameter) -> float:
        """Return the largest machine epsilon of the dtypes in which a gradient is added, reduced or used."""
        passed = (self.gradient_of(parameter), self.reduce_of(parameter), self.master_of(parameter))
        return max(epsilon_of(dtype) for dtype in passed)

    def may_overflow(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of `parameter` is computed, accumulated or reduced in fp16."""
        kinds = (self.compute_of(parameter), self.gradient_of(parameter), self.reduce_of(parameter))
        return parameter.requires_grad and torch.float16 in kinds

    def scales_dynamically(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether a model with these parameters has a dynamic loss scale."""
        return self.loss_scale is None and any(map(self.may_overflow, parameters))


def formats_of(plan: Plan) -> NumberFormats:
    """Return the dtypes and the loss scale that `plan` implies."""
    return NumberFormats(
        compute=DTYPES[plan.precision],
        master=DTYPES[plan.master_precision],
        gradient=DTYPES[plan.gradient_precision],
        reduce=DTYPES[plan.reduce_precision],
        loss_scale=plan.loss_scale,
    )


def epsilon_of(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a dtype; 0 for integers."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


@dataclass
class ReferenceLossScale:
    """The loss scale of a reference run, constant or growing; the run fails where gradients overflow."""

    value: float = 1.0
    dynamic: bool = False
    finite_steps: int = GROWTH_INTERVAL - 1
    """Starts one step before a dynamic scale grows, so that a verification compares its growth."""

    def update(self) -> None:
        """Count a step with finite gradients; double a dynamic scale after every 2,000th."""
        self.finite_steps += 1
        if self.dynamic and self.finite_steps % GROWTH_INTERVAL == 0:
            self.value *= 2
