"""Mistakes of the loss scale: left in gradients, removed twice, not adapted; overflows that go unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from plait.engine import Engine
from plait.engine.pipeline.loss_stage import LossStage, OverwritingLossStage
from plait.engine.sharding import loss_scale
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.engine.sharding.loss_scale import LossScale
from plait.engine.sharding.reducer import Reducer
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import rank
from zoo.precision import BOTH, MIXED, NORM, TWO_NATIVE_STEPS, native_row

SCALED = replace(MIXED, loss_scale=1024.0)
SCALED_STAGES = replace(cases.TWO_STAGES, precision="bf16", master_precision="fp32", loss_scale=1024.0)
HALF = replace(cases.TWO_COPIES, precision="fp16", master_precision="fp32")
HALF_STAGES = replace(cases.TWO_STAGES, precision="fp16", master_precision="fp32")
LAST = "loss scale"


def _finishing(change: Callable[[FlatBuffer, float], float]) -> Any:
    """The scale that a buffer's final gradient is divided by is what `change` gives."""
    original = FlatBuffer.finish_gradients

    def finish(self: FlatBuffer, carried: Tensor | None, scale: float) -> None:
        original(self, carried, change(self, scale))

    return patch.object(FlatBuffer, "finish_gradients", finish)


def unit_left_scaled() -> Any:
    """One unit keeps the scale of the loss."""
    return _finishing(lambda buffer, scale: 1.0 if NORM in buffer.parameters else scale)


def nothing_unscaled() -> Any:
    """Gradients keep the scale of the loss."""
    return _finishing(lambda buffer, scale: 1.0)


def unscaled_twice() -> Any:
    """By the engine and by hand."""
    return _finishing(lambda buffer, scale: scale**2)


def unscaled_by_another_scale_on_one_rank() -> Any:
    """Rank 1 has doubled its scale already."""
    return _finishing(lambda buffer, scale: scale * (1 + rank()))


def loss_scaled_twice() -> Any:
    """The loss is multiplied by the square of its scale."""
    original = LossStage.begin

    def begin(self: LossStage, targets: Any, scale: Tensor | None) -> None:
        original(self, targets, None if scale is None else scale * 1024)

    return patch.object(LossStage, "begin", begin)


@contextmanager
def last_microbatch_not_scaled() -> Iterator[None]:
    """The scale is lost for micro-batch 1."""
    original = OverwritingLossStage.compute

    def compute(self: OverwritingLossStage, microbatch: int, output: Any) -> None:
        scale = self.scale
        self.scale = scale / 1024 if scale is not None and microbatch == 1 else scale
        try:
            original(self, microbatch, output)
        finally:
            self.scale = scale

    with patch.object(OverwritingLossStage, "compute", compute):
        yield


def overflow_not_dropped() -> Any:
    """Gradients that are not finite reach the optimizer."""
    return patch.object(Reducer, "drop", lambda self: None)


def overflow_judged_by_each_rank() -> Any:
    """A rank drops its gradients where its own are not finite."""
    original = Engine.clip_grad_norm_

    def clip(self: Engine, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
        own = all(bool(p.grad.isfinite().all()) for p in self.parameters() if p.grad is not None)
        with patch.object(Reducer, "drop", (lambda _: None) if own else Reducer.drop):
            return original(self, max_norm, norm_type, **options)

    return patch.object(Engine, "clip_grad_norm_", clip)


def _updating(update: Callable[[LossScale, bool], None]) -> Any:
    original = LossScale.update

    def patched(self: LossScale, *, finite: bool) -> None:
        original(self, finite=finite)
        update(self, finite)

    return patch.object(LossScale, "update", patched)


def _times(scale: LossScale, factor: float) -> None:
    scale.value *= factor


def scale_not_halved() -> Any:
    """After an overflow the scale stays."""
    return _updating(lambda scale, finite: None if finite else _times(scale, 2))


def scale_quartered() -> Any:
    """After an overflow the scale is divided by four."""
    return _updating(lambda scale, finite: None if finite else _times(scale, 0.5))


def fixed_scale_halved() -> Any:
    """A scale that was told is lowered by an overflow."""
    return _updating(lambda scale, finite: None if finite else _times(scale, 0.5))


def scale_never_grows() -> Any:
    """Good steps are not counted."""
    return patch.object(loss_scale, "GROWS_AFTER", 10**9)


def scale_grows_on_one_rank() -> Any:
    """Rank 0 counts one good step too few: refused by the engine, which compares scales."""

    def update(scale: LossScale, finite: bool) -> None:
        if rank() == 0 and finite and scale.good_steps == 0:
            _times(scale, 0.5)

    return _updating(update)


SCALING = (
    native_row(
        StepPhase.REDUCTION,
        unit_left_scaled,
        SCALED,
        full=False,
        ranks=BOTH,
        parameter="blocks.0.mlp.*",
        cause="1024",
    ),
    native_row(StepPhase.REDUCTION, nothing_unscaled, SCALED, ranks=BOTH, cause="1024"),
    native_row(StepPhase.REDUCTION, unscaled_twice, SCALED, ranks=BOTH),
    native_row(StepPhase.REDUCTION, unscaled_by_another_scale_on_one_rank, SCALED, ranks=(1,)),
    native_row(StepPhase.LOSS_GRADIENT, loss_scaled_twice, SCALED, microbatch=0, cause="1024"),
    native_row(StepPhase.LOSS_GRADIENT, last_microbatch_not_scaled, SCALED_STAGES, microbatch=1, ranks=(1,)),
    native_row(
        StepPhase.OPTIMIZER,
        overflow_not_dropped,
        SCALED,
        full=False,
        step=1,
        ranks=BOTH,
        cause="were not finite",
    ),
    native_row(
        StepPhase.OPTIMIZER,
        overflow_judged_by_each_rank,
        HALF_STAGES,
        step=1,
        ranks=(0,),
        cause="were not finite",
    ),
    native_row(
        StepPhase.LOSS_GRADIENT, scale_not_halved, HALF, full=False, parameter=LAST, step=1, ranks=BOTH
    ),
    native_row(StepPhase.LOSS_GRADIENT, scale_quartered, HALF_STAGES, parameter=LAST, step=1, ranks=BOTH),
    native_row(StepPhase.LOSS_GRADIENT, fixed_scale_halved, SCALED, parameter=LAST, step=1, ranks=BOTH),
    native_row(
        StepPhase.LOSS_GRADIENT,
        scale_never_grows,
        HALF,
        parameter=LAST,
        step=1,
        ranks=BOTH,
        options=TWO_NATIVE_STEPS,
    ),
)
