"""Mistakes of mixed precision: a dtype that is narrower than asked for, copies that are not the masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parity.case import Case
from plait.engine import Engine, blueprint
from plait.engine.pipeline.stage import Stage
from plait.engine.sharding import gatherer, reducer
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.engine.sharding.unit import UnitFactory
from plait.plan.parameter_units import PRECISIONS, UnitSpec, resolve_units
from plait.plan.plan import Plan, Precision
from plait.ranks.handle import Handle
from plait.tensor.parallel import embedding_and_norm as norm
from plait.verification.options import VerifyOptions
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.bounds import right_factor, scaling
from zoo.fine_tuning import NORMS
from zoo.row import Named, Row

NATIVE = VerifyOptions(mode="native", steps=1)
TWO_NATIVE_STEPS = VerifyOptions(mode="native", steps=2)
MIXED = replace(cases.TWO_COPIES_OF_THREE, precision="bf16", master_precision="fp32")
MIXED_SHARDS = replace(MIXED, strategy="full", reduce="each")
NORM = "blocks.0.mlp.norm.weight"
BOTH = (0, 1)


def mean_square_in_16_bits() -> Any:
    """A norm that tp partitions adds up its mean square in the dtype of the layers."""

    def partitioned(x: Tensor, weight: Tensor, epsilon: float | None, group: Any) -> Tensor:
        mean = norm.copy(norm.reduce(x.pow(2).mean(-1, keepdim=True), group), group).float() / group.size
        return (weight * (x.float() * torch.rsqrt(mean + (epsilon or 1e-7)))).to(x.dtype)

    return patch.object(norm, "partitioned_rms_norm", partitioned)


def divided_by_the_scale_in_16_bits() -> Any:
    """Gradients are divided by the loss scale before they are copied to where they have more digits."""
    original = FlatBuffer.finish_gradients

    def finish(self: FlatBuffer, carried: Tensor | None, scale: float) -> None:
        if scale != 1 and self.gradient is not None:
            self.gradient.div_(scale)
        original(self, carried, 1.0)

    return patch.object(FlatBuffer, "finish_gradients", finish)


def in_16_bits(tensor: Tensor) -> Tensor:
    """Rounded to bfloat16, in its own dtype."""
    return tensor.bfloat16().to(tensor.dtype)


def _kinds(**dtypes: Precision) -> Any:
    """The engine's blueprint gives parameters other dtypes; the plan, and so the verifier, says others."""
    changed = {name: PRECISIONS[precision] for name, precision in dtypes.items()}

    def resolved(*given: Any) -> dict[str, UnitSpec]:
        return {
            name: replace(unit, kinds={key: replace(kind, **changed) for key, kind in unit.kinds.items()})
            for name, unit in resolve_units(*given).items()
        }

    return patch.object(blueprint, "resolve_units", resolved)


def travels_in_16_bits() -> Any:
    """Gradients are reduced in bfloat16."""
    return _kinds(reduce="bf16")


def masters_in_16_bits() -> Any:
    """The optimizer updates what layers use; gradients are added up in float32 still."""
    return _kinds(master="bf16", gradient="fp32")


def gradients_in_16_bits() -> Any:
    """The gradients' own memory is bfloat16; they travel in float32."""
    return _kinds(gradient="bf16", reduce="fp32")


@contextmanager
def added_up_in_16_bits() -> Iterator[None]:
    """Each sum of a layer's weight gradients is rounded."""
    original = Stage.backward_weight

    def backward_weight(self: Stage, microbatch: int, number: int) -> None:
        original(self, microbatch, number)
        for parameter in self.layers[number].module.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(in_16_bits(parameter.grad))

    with patch.object(Stage, "backward_weight", backward_weight):
        yield


@contextmanager
def rounded_before_the_reduction() -> Iterator[None]:
    """A rank's own gradients are rounded; they travel, and are summed, in float32."""
    original = reducer._reduce

    def reduce(buffer: FlatBuffer) -> Handle[Tensor]:
        buffer.gradient.copy_(in_16_bits(buffer.gradient))
        return original(buffer)

    with patch.object(reducer, "_reduce", reduce):
        yield


@contextmanager
def shards_scattered_in_16_bits() -> Iterator[None]:
    """Gradients that are cut travel in bfloat16, micro-batch by micro-batch."""
    original = reducer._scatter

    def scatter(buffer: FlatBuffer) -> Handle[Tensor]:
        buffer.gradient.copy_(in_16_bits(buffer.gradient))
        return original(buffer)

    with patch.object(reducer, "_scatter", scatter):
        yield


@contextmanager
def masters_filled_from_copies() -> Iterator[None]:
    """What the optimizer updates starts from what layers use."""
    original = UnitFactory._fill

    def fill(self: UnitFactory, buffer: FlatBuffer) -> None:
        original(self, buffer)
        buffer.shard.copy_(in_16_bits(buffer.shard))

    with patch.object(UnitFactory, "_fill", fill):
        yield


def _after_step(change: Callable[[torch.optim.Optimizer], None]) -> Any:
    """`Engine.step` ends with a change of what the optimizer has made."""
    original = Engine.step

    @torch.no_grad()
    def step(self: Engine, optimizer: torch.optim.Optimizer, *how: Any) -> Tensor:
        norm = original(self, optimizer, *how)
        change(optimizer)
        return norm

    return patch.object(Engine, "step", step)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def masters_rounded_by_the_step() -> Any:
    """What the optimizer updates is rounded to what layers use."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for parameter in _parameters_of(optimizer):
            parameter.copy_(in_16_bits(parameter))

    return _after_step(change)


def state_in_16_bits() -> Any:
    """The optimizer keeps its moments in bfloat16."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].copy_(in_16_bits(state["exp_avg"]))

    return _after_step(change)


@contextmanager
def _copying(change: Callable[[FlatBuffer, Tensor], Tensor]) -> Iterator[None]:
    """What layers use becomes what `change` makes of a buffer and its old copy."""
    original = gatherer._gather

    @torch.no_grad()
    def gather(buffer: FlatBuffer) -> Handle[Tensor] | None:
        before = buffer.own.clone()
        handle = original(buffer)
        buffer.own.copy_(change(buffer, before))
        return handle

    with patch.object(gatherer, "_gather", gather):
        yield


def stale_copy() -> Any:
    """One unit's copy in bfloat16 is made once."""
    made: set[int] = set()

    def change(buffer: FlatBuffer, before: Tensor) -> Tensor:
        if "blocks.0.mlp.up.weight" not in buffer.parameters or id(buffer) not in made:
            made.add(id(buffer))
            return buffer.own
        return before

    return _copying(change)


def copies_cut_off() -> Any:
    """Digits are cut off, not rounded."""
    return _copying(lambda buffer, _: (buffer.shard.view(torch.int32) & -65536).view(torch.float32))


def copies_of_scaled_masters() -> Any:
    """A factor of 1 + 1/64, two roundings of bfloat16."""
    return _copying(lambda buffer, _: buffer.shard * (1 + 2**-6))


def clip_factor_in_16_bits() -> Any:
    """The factor is of the layers' dtype."""
    return scaling(lambda norm, bound: in_16_bits(right_factor(norm, bound)))


def native_row(
    phase: StepPhase,
    defect: Any,
    plan: Plan,
    *,
    model: Case = cases.GPT2,
    full: bool = True,
    options: VerifyOptions = NATIVE,
    **more: Any,
) -> Row:
    return Row(
        defect=defect,
        model=model,
        plan=plan,
        named=Named(phase=phase, **more),
        options=options,
        full=full,
    )


PRECISION = (
    native_row(StepPhase.REDUCTION, travels_in_16_bits, MIXED, full=False, ranks=BOTH),
    native_row(
        StepPhase.INITIAL, masters_in_16_bits, MIXED, ranks=BOTH, cause="dtype is bfloat16 instead of float32"
    ),
    native_row(
        StepPhase.WEIGHT_GRADIENT,
        gradients_in_16_bits,
        MIXED,
        cause="dtype is bfloat16 instead of float32",
    ),
    native_row(
        StepPhase.WEIGHT_GRADIENT,
        added_up_in_16_bits,
        MIXED,
        full=False,
        cause="rounded to bfloat16",
    ),
    native_row(StepPhase.REDUCTION, rounded_before_the_reduction, MIXED, ranks=BOTH),
    native_row(StepPhase.REDUCTION, shards_scattered_in_16_bits, MIXED_SHARDS, ranks=BOTH),
    native_row(StepPhase.INITIAL, masters_filled_from_copies, MIXED, ranks=BOTH),
    native_row(StepPhase.OPTIMIZER, masters_rounded_by_the_step, MIXED, full=False, ranks=BOTH),
    native_row(StepPhase.OPTIMIZER, state_in_16_bits, MIXED, ranks=BOTH, parameter=".*/exp_avg"),
    native_row(
        StepPhase.PARAMETERS,
        stale_copy,
        MIXED,
        full=False,
        ranks=BOTH,
        layer="blocks.0.mlp",
        parameter="blocks.0.mlp.*",
        step=1,
        options=TWO_NATIVE_STEPS,
        cause="before the last step",
    ),
    native_row(StepPhase.PARAMETERS, copies_cut_off, MIXED, ranks=BOTH),
    native_row(StepPhase.PARAMETERS, copies_of_scaled_masters, MIXED, ranks=BOTH),
    native_row(StepPhase.CLIP, clip_factor_in_16_bits, MIXED, ranks=BOTH),
    native_row(
        StepPhase.FORWARD,
        mean_square_in_16_bits,
        replace(cases.TWO_PARTS, precision="bf16", master_precision="fp32"),
        model=NORMS,
        full=False,
        layer="block",
        microbatch=0,
        ranks=BOTH,
        cause="of the norm joint: .* computed in 16 bits",
    ),
    native_row(
        StepPhase.REDUCTION,
        divided_by_the_scale_in_16_bits,
        replace(cases.TWO_COPIES, precision="fp16", gradient_precision="fp16", master_precision="fp32"),
        full=False,
        ranks=BOTH,
        cause="divided by the loss scale in float16",
    ),
)
