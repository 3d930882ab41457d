"""Mistakes of `Engine.step` and of clipping: what is left out, done in another order, or twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import Engine, engine
from plait.sharding.gatherer import Gatherer
from plait.sharding.norm import scale_to, start_norm
from plait.verification.place import Phase
from plait.verification.recipe import Recipe
from zoo import cases
from zoo.patching import rank
from zoo.row import ONE_STEP, TWO_STEPS, Named, Row

BOTH = (0, 1)
EXACT = Recipe(mode="exact", steps=1)
Optimizer = torch.optim.Optimizer


def _stepping(step: Callable[[Engine, Optimizer, Callable[[], Tensor]], Tensor]) -> Any:
    """`Engine.step` becomes `step`, which is given the engine, the optimizer, and what clips."""

    def patched(self: Engine, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return step(self, optimizer, lambda: self.clip_grad_norm_(max_norm, norm_type))

    return patch.object(Engine, "step", patched)


def _around(before: Callable[[Optimizer], object], after: Callable[[Optimizer], object]) -> Any:
    """`Engine.step` does something before and after the step of the optimizer."""

    def step(_: Engine, optimizer: Optimizer, clip: Callable[[], Tensor]) -> Tensor:
        norm = clip()
        before(optimizer)
        optimizer.step()
        after(optimizer)
        return norm

    return _stepping(step)


def _nothing(_: Optimizer) -> None: ...


def step_without_the_optimizer() -> Any:
    """Gradients are clipped, and nobody steps."""
    return _stepping(lambda engine, optimizer, clip: clip())


def stepped_before_clipping() -> Any:
    """The optimizer sees gradients as they are."""

    def step(_: Engine, optimizer: Optimizer, clip: Callable[[], Tensor]) -> Tensor:
        optimizer.step()
        return clip()

    return _stepping(step)


def stepped_twice() -> Any:
    """Once by the engine and once by hand."""
    return _around(_nothing, lambda optimizer: optimizer.step())


def stepped_on_the_first_rank_only() -> Any:
    """As where the others are thought to be told."""

    def step(_: Engine, optimizer: Optimizer, clip: Callable[[], Tensor]) -> Tensor:
        norm = clip()
        if rank() == 0:
            optimizer.step()
        return norm

    return _stepping(step)


def stepped_without_clipping() -> Any:
    """The norm is taken, and nothing is scaled."""

    def step(engine: Engine, optimizer: Optimizer, clip: Callable[[], Tensor]) -> Tensor:
        norm = engine.clip_grad_norm_(float("inf"))
        optimizer.step()
        return norm

    return _stepping(step)


def norm_after_clipping_returned() -> Any:
    """The norm that the gradients have in the end."""

    def step(engine: Engine, optimizer: Optimizer, clip: Callable[[], Tensor]) -> Tensor:
        clip()
        norm = engine.clip_grad_norm_(float("inf"))
        optimizer.step()
        return norm

    return _stepping(step)


def gradients_gone_before_the_step() -> Any:
    """`zero_grad` comes before the step."""
    return _around(lambda optimizer: optimizer.zero_grad(), _nothing)


def gradients_zero_before_the_step() -> Any:
    """Likewise, so that weights decay all the same."""
    return _around(lambda optimizer: optimizer.zero_grad(set_to_none=False), _nothing)


def divided_again_before_the_step() -> Any:
    """By the number of micro-batches."""

    def divide(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(2)

    return _around(divide, _nothing)


def state_gone_after_the_step() -> Any:
    """The optimizer begins anew each time."""
    return _around(_nothing, lambda optimizer: optimizer.state.clear())


def _scaled_rate(factor: float) -> Callable[[Optimizer], None]:
    def scale(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor

    return scale


def rate_doubled_in_the_step() -> Any:
    """As after a warm-up that counts twice."""
    return _around(_scaled_rate(2), _scaled_rate(0.5))


def weights_decay_again() -> Any:
    """Besides the optimizer's own decay."""

    @torch.no_grad()
    def decay(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-4)

    return _around(_nothing, decay)


def only_the_first_group_steps() -> Any:
    """Vectors stay as they are."""
    groups: list[Any] = []

    def hide(optimizer: Optimizer) -> None:
        groups[:] = optimizer.param_groups
        optimizer.param_groups = groups[:1]

    def show(optimizer: Optimizer) -> None:
        optimizer.param_groups = list(groups)

    return _around(hide, show)


@contextmanager
def steps_only_where_it_clips() -> Iterator[None]:
    """A step whose norm is below the bound is taken for one that is left out."""

    def step(self: Engine, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm = self.clip_grad_norm_(max_norm, norm_type)
        if norm > max_norm:
            optimizer.step()
        return norm

    with patch.object(Engine, "step", step):
        yield


def norm_type_lost_in_the_step() -> Any:
    """`Engine.step` clips by the 2-norm, whatever it is told."""
    original = Engine.clip_grad_norm_

    def step(self: Engine, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm = original(self, max_norm)
        optimizer.step()
        return norm

    return patch.object(Engine, "step", step)


@contextmanager
def gathered_after_steps_of_the_engine_only() -> Iterator[None]:
    """What `optimizer.step()` changed by itself is not seen: layers go on with what they have."""
    gather, finish, step = Gatherer.gather, Gatherer.finish, Engine.step
    fresh = [True]

    def gather_fresh(self: Gatherer, name: str) -> None:
        if fresh[0]:
            gather(self, name)

    def finished(self: Gatherer) -> None:
        fresh[0] = False
        finish(self)

    def stepped(self: Engine, *arguments: Any) -> Tensor:
        fresh[0] = True
        return step(self, *arguments)

    with (
        patch.multiple(Gatherer, gather=gather_fresh, finish=finished),
        patch.object(Engine, "step", stepped),
    ):
        yield


def _scaling(factor_of: Callable[[Tensor, float], Tensor]) -> Any:
    """Gradients are scaled by what `factor_of` makes of the norm and its bound."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        factor = factor_of(norm, max_norm)
        for unit in units:
            for piece in unit.pieces.values():
                if piece.grad is not None:
                    piece.grad.mul_(factor.to(piece.grad.dtype))

    return patch.object(engine, "scale_to", scale)


def _right(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clipped_without_clamp() -> Any:
    """Gradients below the bound grow up to it."""
    return _scaling(lambda norm, bound: bound / (norm + 1e-6))


def clamped_from_below() -> Any:
    """The factor is at least 1."""
    return _scaling(lambda norm, bound: (bound / (norm + 1e-6)).clamp(min=1.0))


def clipped_from_four_times_the_bound() -> Any:
    """Norms that are only a little too large are let through."""
    return _scaling(
        lambda norm, bound: torch.where(norm < 4 * bound, torch.ones_like(norm), _right(norm, bound))
    )


def bound_shared_by_ranks() -> Any:
    """Each of two ranks has half of it."""
    return _scaling(lambda norm, bound: _right(norm, bound / 2))


def clipped_by_the_square() -> Any:
    """The root is forgotten."""
    return _scaling(lambda norm, bound: _right(norm**2, bound))


def clipped_with_a_large_epsilon() -> Any:
    """1e-3 in the place of 1e-6."""
    return _scaling(lambda norm, bound: (bound / (norm + 1e-3)).clamp(max=1.0))


def factor_in_single_precision() -> Any:
    """In float64 a factor of float32."""
    return _scaling(lambda norm, bound: _right(norm, bound).float().double())


def clipped_element_by_element() -> Any:
    """As `clip_grad_value_` does."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        for unit in units:
            for piece in unit.pieces.values():
                piece.grad.clamp_(-max_norm / 8, max_norm / 8)

    return patch.object(engine, "scale_to", scale)


def first_unit_not_clipped() -> Any:
    """The embedding keeps its gradients."""
    return patch.object(engine, "scale_to", lambda units, *how: scale_to(list(units)[1:], *how))


def clipped_on_the_last_rank_only() -> Any:
    """Where the loss is."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        if rank() == 1:
            scale_to(units, norm, max_norm)

    return patch.object(engine, "scale_to", scale)


def clipped_in_the_first_step_only() -> Any:
    """As where a flag is not set anew."""
    calls: list[float] = []

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        calls.append(max_norm)
        if len(calls) <= 3:
            scale_to(units, norm, max_norm)

    return patch.object(engine, "scale_to", scale)


def norm_is_the_clipped_one() -> Any:
    """`clip_grad_norm_` gives the smaller of norm and bound."""
    original = Engine.clip_grad_norm_

    def clip(self: Engine, max_norm: float, *arguments: Any, **options: Any) -> Tensor:
        return original(self, max_norm, *arguments, **options).clamp(max=max_norm)

    return patch.object(Engine, "clip_grad_norm_", clip)


def norm_in_16_bits() -> Any:
    """A norm that travels in bfloat16."""
    return patch.object(engine, "start_norm", lambda *how: lambda: start_norm(*how)().bfloat16().double())


def largest_element_of_own_rank() -> Any:
    """Each rank clips by the maximum of what it holds itself."""

    def own(units: Any, counted: Any, group: Any, device: Any, order: float = 2.0) -> Callable[[], Tensor]:
        if order == 2.0:
            return start_norm(units, counted, group, device, order)
        grads = [piece.grad for unit in units for piece in unit.pieces.values() if piece.grad is not None]
        return lambda: torch.stack([grad.abs().max() for grad in grads]).max()

    return patch.object(engine, "start_norm", own)


def norm_of_the_engine_is_always_two() -> Any:
    """`norm_type` is taken and not used."""
    return patch.object(engine, "start_norm", lambda *how: start_norm(*how[:4]))


def _row(
    phase: Phase, defect: Any, plan: Any, *, full: bool = True, recipe: Any = ONE_STEP, **more: Any
) -> Row:
    return Row(
        defect=defect,
        model=cases.GPT2,
        plan=plan,
        named=Named(phase=phase, **more),
        recipe=recipe,
        full=full,
    )


COPIES, STAGES = cases.TWO_COPIES, cases.TWO_STAGES
VECTORS = ".*(bias|norm.weight)(/.*)?"
STEPS = (
    _row(Phase.OPTIMIZER, step_without_the_optimizer, STAGES, full=False, ranks=BOTH, cause="not updated"),
    _row(Phase.CLIP, stepped_before_clipping, STAGES, full=False, ranks=BOTH, cause="not scaled"),
    _row(Phase.OPTIMIZER, stepped_twice, COPIES, ranks=BOTH),
    _row(
        Phase.OPTIMIZER, stepped_on_the_first_rank_only, COPIES, full=False, ranks=(1,), cause="not updated"
    ),
    _row(Phase.CLIP, stepped_without_clipping, COPIES, ranks=BOTH, cause="not scaled"),
    _row(Phase.NORM, norm_after_clipping_returned, STAGES, ranks=BOTH),
    _row(Phase.CLIP, gradients_gone_before_the_step, COPIES, ranks=BOTH, cause="zero"),
    _row(Phase.CLIP, gradients_zero_before_the_step, COPIES, ranks=BOTH, cause="zero"),
    _row(Phase.CLIP, divided_again_before_the_step, COPIES, ranks=BOTH),
    _row(Phase.OPTIMIZER, state_gone_after_the_step, COPIES, ranks=BOTH, cause="no such state"),
    _row(Phase.OPTIMIZER, rate_doubled_in_the_step, COPIES, ranks=BOTH),
    _row(Phase.OPTIMIZER, weights_decay_again, STAGES, ranks=BOTH),
    _row(
        Phase.OPTIMIZER,
        only_the_first_group_steps,
        STAGES,
        ranks=BOTH,
        parameter=VECTORS,
        cause="not updated",
    ),
    _row(
        Phase.OPTIMIZER,
        steps_only_where_it_clips,
        STAGES,
        full=False,
        ranks=BOTH,
        parameter="an optimizer of one step",
    ),
    _row(Phase.NORM, norm_type_lost_in_the_step, STAGES, full=False, ranks=BOTH, recipe=EXACT),
    _row(
        Phase.EVALUATION,
        gathered_after_steps_of_the_engine_only,
        cases.CUT_STATE,
        step=2,
        ranks=BOTH,
        recipe=TWO_STEPS,
    ),
)
BOUNDS = (
    _row(
        Phase.CLIP,
        clipped_without_clamp,
        STAGES,
        full=False,
        ranks=BOTH,
        cause="though the norm is below the bound",
    ),
    _row(Phase.CLIP, clamped_from_below, STAGES, ranks=BOTH),
    _row(Phase.CLIP, clipped_from_four_times_the_bound, COPIES, full=False, ranks=BOTH, cause="not scaled"),
    _row(Phase.CLIP, bound_shared_by_ranks, COPIES, ranks=BOTH, cause="1/2"),
    _row(Phase.CLIP, clipped_by_the_square, STAGES, ranks=BOTH),
    _row(Phase.CLIP, clipped_with_a_large_epsilon, COPIES, ranks=BOTH),
    _row(Phase.CLIP, factor_in_single_precision, COPIES, ranks=BOTH),
    _row(Phase.CLIP, clipped_element_by_element, COPIES, ranks=BOTH),
    _row(Phase.CLIP, first_unit_not_clipped, COPIES, ranks=BOTH, cause="not scaled"),
    _row(Phase.CLIP, clipped_on_the_last_rank_only, COPIES, ranks=(0,), cause="not scaled"),
    _row(
        Phase.CLIP,
        clipped_in_the_first_step_only,
        COPIES,
        full=False,
        ranks=BOTH,
        step=1,
        recipe=TWO_STEPS,
        cause="not scaled",
    ),
    _row(Phase.NORM, norm_is_the_clipped_one, STAGES, full=False, ranks=BOTH),
    _row(Phase.NORM, norm_in_16_bits, STAGES, ranks=BOTH),
    _row(Phase.NORM, largest_element_of_own_rank, STAGES, full=False, recipe=EXACT),
    _row(
        Phase.NORM,
        norm_of_the_engine_is_always_two,
        replace(STAGES, microbatches=3),
        ranks=BOTH,
        recipe=EXACT,
    ),
)
STEPPING = STEPS + BOUNDS
