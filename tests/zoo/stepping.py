"""Mistakes of `Engine.step`: what is left out, done in another order, or twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import Engine
from plait.engine.sharding.gatherer import Gatherer
from plait.verification.options import VerifyOptions
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import rank
from zoo.row import ONE_STEP, TWO_STEPS, Named, Row

BOTH = (0, 1)
EXACT = VerifyOptions(mode="exact", steps=1)
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


def row_of(
    phase: StepPhase, defect: Any, plan: Any, *, full: bool = True, options: Any = ONE_STEP, **more: Any
) -> Row:
    return Row(
        defect=defect,
        model=cases.GPT2,
        plan=plan,
        named=Named(phase=phase, **more),
        options=options,
        full=full,
    )


COPIES, STAGES = cases.TWO_COPIES, cases.TWO_STAGES
VECTORS = ".*(bias|norm.weight)(/.*)?"
STEPPING = (
    row_of(
        StepPhase.OPTIMIZER, step_without_the_optimizer, STAGES, full=False, ranks=BOTH, cause="not updated"
    ),
    row_of(StepPhase.CLIP, stepped_before_clipping, STAGES, full=False, ranks=BOTH, cause="not scaled"),
    row_of(StepPhase.OPTIMIZER, stepped_twice, COPIES, ranks=BOTH),
    row_of(
        StepPhase.OPTIMIZER,
        stepped_on_the_first_rank_only,
        COPIES,
        full=False,
        ranks=(1,),
        cause="not updated",
    ),
    row_of(StepPhase.CLIP, stepped_without_clipping, COPIES, ranks=BOTH, cause="not scaled"),
    row_of(StepPhase.NORM, norm_after_clipping_returned, STAGES, ranks=BOTH),
    row_of(StepPhase.CLIP, gradients_gone_before_the_step, COPIES, ranks=BOTH, cause="zero"),
    row_of(StepPhase.CLIP, gradients_zero_before_the_step, COPIES, ranks=BOTH, cause="zero"),
    row_of(StepPhase.CLIP, divided_again_before_the_step, COPIES, ranks=BOTH),
    row_of(StepPhase.OPTIMIZER, state_gone_after_the_step, COPIES, ranks=BOTH, cause="no such state"),
    row_of(StepPhase.OPTIMIZER, rate_doubled_in_the_step, COPIES, ranks=BOTH),
    row_of(StepPhase.OPTIMIZER, weights_decay_again, STAGES, ranks=BOTH),
    row_of(
        StepPhase.OPTIMIZER,
        only_the_first_group_steps,
        STAGES,
        ranks=BOTH,
        parameter=VECTORS,
        cause="not updated",
    ),
    row_of(
        StepPhase.OPTIMIZER,
        steps_only_where_it_clips,
        STAGES,
        full=False,
        ranks=BOTH,
        parameter="an optimizer of one step",
    ),
    row_of(StepPhase.NORM, norm_type_lost_in_the_step, STAGES, full=False, ranks=BOTH, options=EXACT),
    row_of(
        StepPhase.PARAMETERS,
        gathered_after_steps_of_the_engine_only,
        cases.CUT_STATE,
        step=2,
        ranks=BOTH,
        options=TWO_STEPS,
    ),
)
