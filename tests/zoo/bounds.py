"""Mistakes of norms and of clipping: a factor without its clamp, another bound, other gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import Engine
from plait.engine import engine as gradient_clipping
from plait.engine.sharding.gradient_norm import scale_to, start_norm
from plait.verification.step_location import StepPhase
from zoo.patching import rank
from zoo.row import TWO_STEPS
from zoo.stepping import BOTH, COPIES, EXACT, STAGES, row_of


def scaling(factor_of: Callable[[Tensor, float], Tensor]) -> Any:
    """Gradients are scaled by what `factor_of` makes of the norm and its bound."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        factor = factor_of(norm, max_norm)
        for unit in units:
            for shard in unit.shard_parameters.values():
                if shard.grad is not None:
                    shard.grad.mul_(factor.to(shard.grad.dtype))

    return patch.object(gradient_clipping, "scale_to", scale)


def right_factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clipped_without_clamp() -> Any:
    """Gradients below the bound grow up to it."""
    return scaling(lambda norm, bound: bound / (norm + 1e-6))


def clamped_from_below() -> Any:
    """The factor is at least 1."""
    return scaling(lambda norm, bound: (bound / (norm + 1e-6)).clamp(min=1.0))


def clipped_from_four_times_the_bound() -> Any:
    """Norms that are only a little too large are let through."""
    return scaling(
        lambda norm, bound: torch.where(norm < 4 * bound, torch.ones_like(norm), right_factor(norm, bound))
    )


def bound_shared_by_ranks() -> Any:
    """Each of two ranks has half of it."""
    return scaling(lambda norm, bound: right_factor(norm, bound / 2))


def clipped_by_the_square() -> Any:
    """The root is forgotten."""
    return scaling(lambda norm, bound: right_factor(norm**2, bound))


def clipped_with_a_large_epsilon() -> Any:
    """1e-3 in the place of 1e-6."""
    return scaling(lambda norm, bound: (bound / (norm + 1e-3)).clamp(max=1.0))


def factor_in_single_precision() -> Any:
    """In float64 a factor of float32."""
    return scaling(lambda norm, bound: right_factor(norm, bound).float().double())


def clipped_element_by_element() -> Any:
    """As `clip_grad_value_` does."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        for unit in units:
            for shard in unit.shard_parameters.values():
                shard.grad.clamp_(-max_norm / 8, max_norm / 8)

    return patch.object(gradient_clipping, "scale_to", scale)


def first_unit_not_clipped() -> Any:
    """The embedding keeps its gradients."""
    return patch.object(gradient_clipping, "scale_to", lambda units, *how: scale_to(list(units)[1:], *how))


def clipped_on_the_last_rank_only() -> Any:
    """Where the loss is."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        if rank() == 1:
            scale_to(units, norm, max_norm)

    return patch.object(gradient_clipping, "scale_to", scale)


def clipped_in_the_first_step_only() -> Any:
    """As where a flag is not set anew."""
    calls: list[float] = []

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        calls.append(max_norm)
        if len(calls) <= 3:
            scale_to(units, norm, max_norm)

    return patch.object(gradient_clipping, "scale_to", scale)


def norm_is_the_clipped_one() -> Any:
    """`clip_grad_norm_` gives the smaller of norm and bound."""
    original = Engine.clip_grad_norm_

    def clip(self: Engine, max_norm: float, *arguments: Any, **options: Any) -> Tensor:
        return original(self, max_norm, *arguments, **options).clamp(max=max_norm)

    return patch.object(Engine, "clip_grad_norm_", clip)


def norm_in_16_bits() -> Any:
    """A norm that travels in bfloat16."""
    return patch.object(
        gradient_clipping, "start_norm", lambda *how: lambda: start_norm(*how)().bfloat16().double()
    )


def largest_element_of_own_rank() -> Any:
    """Each rank clips by the maximum of what it holds itself."""

    def own(units: Any, counted: Any, group: Any, device: Any, order: float = 2.0) -> Callable[[], Tensor]:
        if order == 2.0:
            return start_norm(units, counted, group, device, order)
        grads = [one.grad for unit in units for one in unit.shard_parameters.values() if one.grad is not None]
        return lambda: torch.stack([grad.abs().max() for grad in grads]).max()

    return patch.object(gradient_clipping, "start_norm", own)


def norm_of_the_engine_is_always_two() -> Any:
    """`norm_type` is taken and not used."""
    return patch.object(gradient_clipping, "start_norm", lambda *how: start_norm(*how[:4]))


BOUNDS = (
    row_of(
        StepPhase.CLIP,
        clipped_without_clamp,
        STAGES,
        full=False,
        ranks=BOTH,
        cause="though the norm is below the bound",
    ),
    row_of(StepPhase.CLIP, clamped_from_below, STAGES, ranks=BOTH),
    row_of(
        StepPhase.CLIP, clipped_from_four_times_the_bound, COPIES, full=False, ranks=BOTH, cause="not scaled"
    ),
    row_of(StepPhase.CLIP, bound_shared_by_ranks, COPIES, ranks=BOTH, cause="1/2"),
    row_of(StepPhase.CLIP, clipped_by_the_square, STAGES, ranks=BOTH),
    row_of(StepPhase.CLIP, clipped_with_a_large_epsilon, COPIES, ranks=BOTH),
    row_of(StepPhase.CLIP, factor_in_single_precision, COPIES, ranks=BOTH),
    row_of(StepPhase.CLIP, clipped_element_by_element, COPIES, ranks=BOTH),
    row_of(StepPhase.CLIP, first_unit_not_clipped, COPIES, ranks=BOTH, cause="not scaled"),
    row_of(StepPhase.CLIP, clipped_on_the_last_rank_only, COPIES, ranks=(0,), cause="not scaled"),
    row_of(
        StepPhase.CLIP,
        clipped_in_the_first_step_only,
        COPIES,
        full=False,
        ranks=BOTH,
        step=1,
        options=TWO_STEPS,
        cause="not scaled",
    ),
    row_of(StepPhase.NORM, norm_is_the_clipped_one, STAGES, full=False, ranks=BOTH),
    row_of(StepPhase.NORM, norm_in_16_bits, STAGES, ranks=BOTH),
    row_of(StepPhase.NORM, largest_element_of_own_rank, STAGES, full=False, options=EXACT),
    row_of(
        StepPhase.NORM,
        norm_of_the_engine_is_always_two,
        replace(STAGES, microbatches=3),
        ranks=BOTH,
        options=EXACT,
    ),
)
