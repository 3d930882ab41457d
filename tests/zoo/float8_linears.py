"""Mistakes of linears in float8: scales of other tensors, other formats, other sums, other linears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import plait
from parity.case import Batch, Case
from parity.cases import case, gpt2
from parity.layers import CLASSES
from plait.engine import blueprint, parallelize
from plait.engine.blueprint import Blueprint
from plait.models.choose_float8_linears import LinearChoice
from plait.plan.rules import column, row, sequence
from plait.proof import layer_runs_on_meta
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh
from plait.tensor.autograd import float8_inputs, float8_linear, float8_operands
from plait.tensor.autograd.float8_inputs import InputParts
from plait.tensor.autograd.float8_operands import WHOLE, LinearCasts
from plait.tensor.autograd.paired_collectives import SumOfSummands
from plait.tensor.float8.cast import ScaledMatrix, cast_by
from plait.tensor.float8.recipes import RECIPES, CastFormat
from plait.verification.options import VerifyOptions
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import ONE_STEP, TWO_STEPS, Defect, Named, Row

MODEL = gpt2(layers=1, hidden=32, heads=2, vocab=48, tied=False)
"""Linears of 32 and 128 features, also halved multiples of 16; a head whose sizes would fit too."""
ATTENTION, MLP = cases.ATTENTION, cases.MLP
TWO_PARTS = replace(cases.TWO_PARTS, linears="float8")
TWO_PARTS_BY_ROWS = replace(TWO_PARTS, linears="float8-rowwise")
TWO_COPIES = replace(cases.TWO_COPIES, linears="float8")
HALVED_SEQUENCE = replace(TWO_PARTS, tp=1, cp=2)
ONE_RANK = replace(TWO_PARTS, tp=1)
ONE_RANK_BY_ROWS = replace(ONE_RANK, linears="float8-rowwise")


def draw_until_the_last(rows: int, generator: torch.Generator) -> Batch:
    """The last target of each row does not count, so that gradients of the last position are zero."""
    inputs, targets = MODEL.draw(rows, generator)
    targets[:, -1] = -100
    return inputs, targets


LAST_IGNORED = replace(MODEL, draw=draw_until_the_last)


def _of_a_part(method: str) -> Any:
    """Each rank scales an operand by the largest values of what it holds."""
    original = getattr(LinearCasts, method)

    def cast(self: LinearCasts, *given: Any) -> Any:
        divided, self.divided = self.divided, WHOLE
        try:
            return original(self, *given)
        finally:
            self.divided = divided

    return patch.object(LinearCasts, method, cast)


def input_scaled_by_each_rank() -> Any:
    """Of row-parallel linears, whose inputs are divided."""
    return _of_a_part("input")


def weight_scaled_by_each_rank() -> Any:
    return patch.object(LinearCasts, "_groups_of_weight", lambda self, *which: ())


def gradient_scaled_by_each_rank() -> Any:
    """Of column-parallel linears, whose outputs are divided."""
    return _of_a_part("gradient")


def positions_scaled_by_each_rank() -> Any:
    """Scales are of a rank's positions, not of the whole sequence."""
    return _of_a_part("input")


@contextmanager
def scales_reduced_over_dp() -> Iterator[None]:
    """Scales are of all ranks' micro-batches, so that numbers depend on how many ranks there are."""
    original, groups = parallelize.build_stages, list[Group]()

    def build(*given: Any) -> Any:
        (mesh,) = (one for one in given if isinstance(one, Mesh))
        groups[:] = [mesh.group("dp")]
        return original(*given)

    of_blueprint = Blueprint.float8_layers

    def layers(self: Blueprint, tp: Group, cp: Group, etp: Group) -> Any:
        return of_blueprint(self, tp, groups[0] if groups else cp, etp)

    with patch.object(parallelize, "build_stages", build), patch.object(Blueprint, "float8_layers", layers):
        yield


def _by_the_last(operand: str) -> Any:
    """An operand is cast by the scale of the call before."""
    original, last = LinearCasts._cast, dict[int, Tensor]()

    def cast(self: LinearCasts, name: Any, matrix: Tensor, form: CastFormat, *how: Any, **more: Any) -> Any:
        if name != operand:
            return original(self, name, matrix, form, *how, **more)
        note, self.note = self.note, None
        right = original(self, name, matrix, form, *how, **more)
        self.note = note
        factor = last.get(id(self), right.scale.reciprocal())
        last[id(self)] = right.scale.reciprocal()
        return self.noted(name, matrix, cast_by(matrix, factor, form))

    return patch.object(LinearCasts, "_cast", cast)


def input_scaled_as_the_micro_batch_before() -> Any:
    """Delayed scaling, where the scale of the tensor itself is asked for."""
    return _by_the_last("input")


def scaled_beyond_the_format_without_a_clamp() -> Any:
    """As after a delayed scale: gradients that a clamp would have kept at the end of e5m2 are infinite."""
    original = float8_operands.cast_by

    def cast(matrix: Tensor, factor: Tensor, form: CastFormat) -> ScaledMatrix:
        if form.dtype != torch.float8_e5m2:
            return original(matrix, factor, form)  # torch clamps to e4m3, which has no infinity
        return ScaledMatrix((matrix * factor * 8).to(form.dtype), factor.reciprocal() / 8)

    return patch.object(float8_operands, "cast_by", cast)


def output_gradients_in_e4m3() -> Any:
    """The recipe asks for e5m2, which has the range of gradients."""
    recipe = RECIPES["float8"]
    wrong = replace(recipe, gradient=recipe.input, gradient_for_weight=recipe.input)
    return patch.object(blueprint, "RECIPES", {**RECIPES, "float8": wrong})


def zeros_divided_by_zero() -> Any:
    """The scale of a row of zeros is infinite, and its product with the row is NaN."""

    def factor_of(largest: Tensor, form: CastFormat) -> Tensor:
        factor = torch.finfo(form.dtype).max / largest
        return torch.exp2(factor.log2().floor()) if form.power_of_two else factor

    return patch.object(float8_operands, "factor_of", factor_of)


def powers_of_two_rounded_up() -> Any:
    """The largest element is clamped, to as little as half of it."""
    original = float8_operands.factor_of

    def factor_of(largest: Tensor, form: CastFormat) -> Tensor:
        return original(largest, form) * 2

    return patch.object(float8_operands, "factor_of", factor_of)


def tokens_scaled_for_the_weight_gradient() -> Any:
    """An input has a scale for each token, where the product that sums over tokens needs one a feature."""
    original = LinearCasts.input_for_weight

    def cast(self: LinearCasts, rows: Tensor, for_output: ScaledMatrix, *parts: Any) -> ScaledMatrix | None:
        right = original(self, rows, for_output, *parts)
        if right is None or rows.shape[0] != rows.shape[1]:
            return right  # there it is an error
        form = self.recipe.input_for_weight
        assert form is not None
        note, self.note = self.note, None
        wrong = self._cast("input_for_weight", rows, form, 1, ((), ()), once=True)
        self.note = note
        return ScaledMatrix(wrong.data, wrong.scale.view(1, -1))

    return patch.object(LinearCasts, "input_for_weight", cast)


def partial_products_in_16_bits() -> Any:
    """The ranks' summands of a row-parallel linear are rounded before they are added."""
    original = SumOfSummands.total

    def total(self: SumOfSummands, summand: Tensor) -> Tensor:
        return original(self, summand.bfloat16().to(summand.dtype))

    return patch.object(SumOfSummands, "total", total)


def head_in_float8() -> Any:
    original = blueprint.choose_linears

    def choose(*given: Any) -> LinearChoice:
        choice = original(*given)
        return LinearChoice((*choice.chosen, "head.output"), choice.others)

    return patch.object(blueprint, "choose_linears", choose)


def one_linear_in_16_bits() -> Any:
    original = blueprint.choose_linears

    def choose(*given: Any) -> LinearChoice:
        choice = original(*given)
        left = f"{MLP}.up"
        return LinearChoice(
            tuple(one for one in choice.chosen if one != left), {**choice.others, left: "head"}
        )

    return patch.object(blueprint, "choose_linears", choose)


def scale_applied_twice() -> Any:
    original = float8_linear.product

    def product(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype) -> Tensor:
        return original(a._replace(scale=a.scale.square()), b, dtype)

    return patch.object(float8_linear, "product", product)


def factor_in_place_of_the_scale() -> Any:
    """Products are multiplied by what they were to be divided by."""
    original = float8_operands.cast_by

    def cast(matrix: Tensor, factor: Tensor, form: CastFormat) -> ScaledMatrix:
        return original(matrix, factor, form)._replace(scale=factor)

    return patch.object(float8_operands, "cast_by", cast)


def weight_scaled_as_in_the_step_before() -> Any:
    """Factors of weights are remembered for ever, not for one step."""
    return patch.object(LinearCasts, "begin_step", lambda self: None)


def scales_of_rows_not_reduced() -> Any:
    """All powers of two give nearly the same numbers: nothing differs but the scales."""
    return _of_a_part("input")


def adapted() -> nn.Module:
    """That model with an adapter at its queries, which reads what they read."""
    return plait.lora(MODEL.build(), rank=4, targets=["*.query"])


ADAPTED = replace(MODEL, name="adapted", build=adapted)


class WithoutNorm(nn.Module):
    """An MLP whose input is not normed, so that tokens have unlike scales."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        result: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return result


def unlike_tokens() -> nn.Module:
    """Tokens whose embeddings are up to sixteen times as large as those of others."""
    model = nn.Sequential(nn.Embedding(48, 32), WithoutNorm(), nn.Linear(32, 48))
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 2, 48, base=2)[:, None])  # type: ignore[operator, union-attr]
    model.rules = {"*.up": column, "*.down": row, "1": sequence.along(1)}  # type: ignore[assignment]
    return model


UNLIKE_TOKENS = replace(MODEL, name="unlike tokens", build=unlike_tokens)


def parts_of_an_input_scaled_by_each_rank() -> Any:
    """A rank casts its part of the sequence by the largest value of that, and all products take its scale."""
    original = float8_inputs.CastInput._operand
    return patch.object(
        float8_inputs.CastInput, "_operand", lambda self, input: (original(self, input)[0], ())
    )


def scales_of_own_tokens_for_all() -> Any:
    """The scales of tokens are not gathered beside the eight bits."""

    def gathered(own: ScaledMatrix, parts: InputParts) -> ScaledMatrix:
        whole = parts.whole(own.data.view(parts.part.shape))
        data = whole.view(-1, whole.shape[-1])
        return ScaledMatrix(data, own.scale.repeat(len(data) // len(own.data), 1))

    return patch.object(float8_inputs, "_gathered", gathered)


def adapter_reads_what_has_no_memory() -> Any:
    """A region's input is gathered in eight bits although an adapter reads it."""
    return patch.object(layer_runs_on_meta, "read_by_float8_only", lambda *given: (True,) * 8)


def largest_values_of_another_gradient() -> Any:
    """What one reduction gives for gradients of queries, keys and values is dealt out in another order."""
    original = float8_inputs.reduced_together

    def reduced(each: Any, reduce: Any) -> list[Tensor]:
        found = original(each, reduce)
        return [*found[1:], *found[:1]]

    return patch.object(float8_inputs, "reduced_together", reduced)


def _row(
    defect: Defect,
    plan: Any,
    layer: str,
    cause: str,
    *,
    phase: StepPhase = StepPhase.FORWARD,
    also: tuple[StepPhase, ...] = (),
    microbatch: int | None = 0,
    step: int = 0,
    model: Case = MODEL,
    options: VerifyOptions = ONE_STEP,
    full: bool = True,
) -> Row:
    named = Named(phase=phase, layer=layer, microbatch=microbatch, step=step, cause=cause, also=also)
    return Row(defect=defect, model=model, plan=plan, named=named, options=options, full=full)


OF_PART = "this rank's part: largest values are not reduced over"
FLOAT8 = (
    _row(
        input_scaled_by_each_rank,
        TWO_PARTS,
        ATTENTION,
        f"the scale of the input of {ATTENTION}.output is another: .*{OF_PART} tp",
        full=False,
    ),
    _row(weight_scaled_by_each_rank, TWO_PARTS, ATTENTION, f"the scale of the weight of .*{OF_PART} tp"),
    _row(
        gradient_scaled_by_each_rank,
        TWO_PARTS,
        MLP,
        f"the scale of the output's gradient of {MLP}.up is another: .*{OF_PART} tp",
        phase=StepPhase.INPUT_GRADIENT,
    ),
    _row(positions_scaled_by_each_rank, HALVED_SEQUENCE, ATTENTION, f"{OF_PART} cp"),
    _row(
        scales_reduced_over_dp,
        TWO_COPIES,
        ATTENTION,
        "that of the micro-batches of all ranks of dp",
    ),
    _row(
        input_scaled_as_the_micro_batch_before,
        ONE_RANK,
        ATTENTION,
        "the scale of the input of .* that of micro-batch 0",
        microbatch=1,
    ),
    _row(
        scaled_beyond_the_format_without_a_clamp,
        ONE_RANK,
        MLP,
        "not a number",
        phase=StepPhase.INPUT_GRADIENT,
    ),
    _row(
        output_gradients_in_e4m3,
        ONE_RANK,
        MLP,
        f"the output's gradient of {MLP}.down is cast to float8_e4m3fn instead of float8_e5m2",
        phase=StepPhase.INPUT_GRADIENT,
        full=False,
    ),
    _row(
        zeros_divided_by_zero,
        ONE_RANK_BY_ROWS,
        MLP,
        "not a number",
        phase=StepPhase.INPUT_GRADIENT,
        model=LAST_IGNORED,
    ),
    _row(powers_of_two_rounded_up, ONE_RANK_BY_ROWS, ATTENTION, "rounded up"),
    _row(
        tokens_scaled_for_the_weight_gradient,
        ONE_RANK_BY_ROWS,
        MLP,
        "the gradient of the layer's output is equal, and that of its weight is not",
        phase=StepPhase.WEIGHT_GRADIENT,
        model=gpt2(layers=1, hidden=16, tied=False),
    ),
    _row(partial_products_in_16_bits, TWO_PARTS, ATTENTION, "output gives is the first to differ"),
    _row(head_in_float8, ONE_RANK, "head", "head.output multiplies in float8, and is to stay"),
    _row(one_linear_in_16_bits, ONE_RANK, MLP, f"{MLP}.up does not multiply in float8"),
    _row(scale_applied_twice, ONE_RANK, ATTENTION, "key gives is the first to differ"),
    _row(
        factor_in_place_of_the_scale, ONE_RANK, ATTENTION, "the factor of the cast in place of its reciprocal"
    ),
    _row(
        weight_scaled_as_in_the_step_before,
        ONE_RANK,
        ATTENTION,
        "the scale of the weight of .* that of the step before",
        step=1,
        options=TWO_STEPS,
    ),
    _row(
        weight_scaled_as_in_the_step_before,
        replace(ONE_RANK, compile="graphs"),
        ATTENTION,
        "",
        step=1,
        options=TWO_STEPS,
    ),
    _row(
        scales_of_own_tokens_for_all,
        replace(TWO_PARTS_BY_ROWS, sequence_parallel="regather"),
        "1",
        "up gives is the first to differ",
        model=UNLIKE_TOKENS,
    ),
    _row(
        adapter_reads_what_has_no_memory,
        replace(TWO_PARTS, sequence_parallel="keep"),
        ATTENTION,
        "not a number",
        model=ADAPTED,
    ),
    _row(
        largest_values_of_another_gradient,
        TWO_PARTS,
        ATTENTION,
        "the scale of the output's gradient of .* is another: it is that of the output's gradient of",
        phase=StepPhase.INPUT_GRADIENT,
    ),
    _row(
        parts_of_an_input_scaled_by_each_rank,
        replace(TWO_PARTS, sequence_parallel="keep"),
        ATTENTION,
        f"the scale of the input of .*{OF_PART} tp",
        full=False,
    ),
    _row(
        scales_of_rows_not_reduced,
        TWO_PARTS_BY_ROWS,
        ATTENTION,
        f"{OF_PART} tp",
        phase=StepPhase.SCALES,
        also=(StepPhase.FORWARD,),
    ),
)


class Mixed(nn.Sequential):
    """Linears that read zeros, that have sizes which are no multiples of 16, and that are frozen."""

    def __init__(self) -> None:
        sizes = 16, 32, 24, 16
        linears = [nn.Linear(*pair) for pair in pairwise(sizes)]
        zeros, last = nn.Threshold(1e9, 0.0), [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)]
        last[1].requires_grad_(False)
        super().__init__(linears[0], zeros, linears[1], nn.GELU(), linears[2], nn.GELU(), *last)


def draw_wider(rows: int, generator: torch.Generator) -> Batch:
    """Vectors of 16 features, and a class for each."""
    return torch.randn(rows, 16, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


MIXED = case(Mixed, draw_wider)
