"""Mistakes of experts in float8: scales of parts of rows, of other rows or experts, in another order."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parity import lora_cases
from parity.case import Batch, Case
from parity.cases import with_values
from plait.plan import rules
from plait.plan.plan import Plan
from plait.tensor.experts import expert_casts, expert_products
from plait.tensor.experts.copies_of_tokens import TokenRows
from plait.tensor.experts.expert_casts import MatrixCasts
from plait.tensor.experts.expert_products import ExpertCall
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.router import Router
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.recipes import CastFormat
from plait.tensor.parallel.apply_float8 import Float8Layers
from plait.verification.options import VerifyOptions
from plait.verification.step_location import StepPhase
from zoo.float8_linears import OF_PART
from zoo.row import ONE_STEP, TWO_STEPS, Defect, Named, Row

LENGTH, WIDTH, INNER = 6, 16, 32


class Sparse(nn.Module):
    """x + experts(norm(x)), each position by itself; few weights are large, so that scales differ."""

    def __init__(self, experts: int = 4, top_k: int = 2, **options: Any) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), Router(WIDTH, experts, top_k)
        self.experts = Experts(WIDTH, INNER, experts, **options)
        with torch.no_grad():
            for weight in (self.experts.gate_up_proj, self.experts.down_proj):
                weight *= torch.randn_like(weight).exp()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        _, weights, indices = self.router(rows)
        return x + self.experts(rows, indices, weights).view_as(x)


def around(*layers: Any) -> nn.Module:
    """A linear, the layers, a linear; each position by itself."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(layer() for layer in layers), nn.Linear(WIDTH, WIDTH))
    model.rules = dict.fromkeys(map(str, range(len(model))), rules.sequence)  # type: ignore[assignment]
    return model


def draw(rows: int, generator: torch.Generator) -> Batch:
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(WIDTH, (rows, LENGTH), generator=generator)


def of(*layers: Any, name: str) -> Case:
    return Case(f"experts in float8 {name}", with_values(partial(around, *layers)), draw)


FOUR_EXPERTS = of(Sparse, partial(Sparse, 3, 1), name="four")
"""Layer 1: four experts, two of each token; layer 2: three, of which one."""
INTERLEAVED = GatedActivation(interleaved=True, slope=1.5, offset=1.0, limit=2.0)
GPT_OSS = of(partial(Sparse, bias=True, transposed=True, activation=INTERLEAVED), name="as in GPT-OSS")
WEIGHTS_FIRST = of(partial(Sparse, bias=True, weights_first=True), name="with weights first")
MANY_EXPERTS = of(partial(Sparse, 40, 1), name="many")
"""More experts than a micro-batch has tokens."""
ADAPTED_EXPERTS = lora_cases.case(FOUR_EXPERTS, targets=("experts.gate_up_proj", "experts.down_proj"))
"""With adapters, which stay in the run's precision."""

ALONE = Plan(linears="float8", microbatches=2)
DIVIDED = replace(ALONE, dp=2, ep=2)
IN_PARTS = replace(ALONE, dp=2, etp=2)
FIRST, SECOND = "1", "2"
"""The paths of the layers with experts."""


def _rows(change: Any) -> Any:
    """`_rows` with other arguments: `change` returns those, given the operand's name and the right ones."""
    original = MatrixCasts._rows

    def rows(self: MatrixCasts, operand: Any, *given: Any) -> ScaledMatrix:
        return original(self, operand, *change(operand, *given))

    return patch.object(MatrixCasts, "_rows", rows)


def inner_rows_scaled_by_each_rank() -> Any:
    """Of what the second matrix is given, of which each rank of `etp` has some features."""
    return _rows(lambda operand, *given: (*given[:-1], () if operand == "input" else given[-1]))


def gradients_of_rows_scaled_by_each_rank() -> Any:
    """Of gate and up, of which each rank of `etp` has some features."""
    return _rows(lambda operand, *given: (*given[:-1], () if operand == "gradient" else given[-1]))


def rows_cast_to_e5m2() -> Any:
    """Gradients, to the format that recipes with one scale a tensor have for them."""

    def change(operand: str, given: Any, copies: Any, form: CastFormat, *more: Any) -> Any:
        wrong = replace(form, dtype=torch.float8_e5m2) if operand == "gradient" else form
        return given, copies, wrong, *more

    return _rows(change)


def _weight(operand: str, change: Any) -> Any:
    """`_weight` with other largest values, by `change` of the right ones, `[experts, outputs or 1, 1]`."""
    original, largest_of = MatrixCasts._weight, expert_casts.largest_of

    def weight(self: MatrixCasts, name: Any, *given: Any) -> ScaledMatrix:
        if name != operand:
            return original(self, name, *given)
        with patch.object(expert_casts, "largest_of", lambda *which: change(largest_of(*which))):
            return original(self, name, *given)

    return patch.object(MatrixCasts, "_weight", weight)


def scale_of_all_experts() -> Any:
    """The matrices of all experts of a rank have one scale, so that it depends on `ep`."""
    return _weight("weight_for_input", lambda largest: largest.amax(0, keepdim=True).expand_as(largest))


def outputs_scaled_together() -> Any:
    """A matrix has one scale where each output feature is to have one."""
    return _weight("weight", lambda largest: largest.amax(1, keepdim=True).expand_as(largest))


def weight_of_experts_scaled_by_each_rank() -> Any:
    original = MatrixCasts._weight

    def weight(self: MatrixCasts, operand: Any, matrices: Tensor, form: CastFormat, _: Any) -> ScaledMatrix:
        return original(self, operand, matrices, form, ())

    return patch.object(MatrixCasts, "_weight", weight)


def _largest_of_rows(change: Any) -> Any:
    """Rows with other largest values, by `change` of the right ones, `[rows, 1]`."""
    original, largest_of = MatrixCasts._rows, expert_casts.largest_of

    def rows(self: MatrixCasts, *given: Any) -> ScaledMatrix:
        with patch.object(expert_casts, "largest_of", lambda *which: change(largest_of(*which))):
            return original(self, *given)

    return patch.object(MatrixCasts, "_rows", rows)


def rows_scaled_together() -> Any:
    """All rows of a rank have one scale, which depends on which tokens have come."""
    return _largest_of_rows(lambda largest: largest.amax(0, keepdim=True).expand_as(largest))


def largest_value_of_experts_rounded_up() -> Any:
    """The largest element of a row is clamped, to as little as half of it."""
    return _largest_of_rows(lambda largest: largest / 2)


def scales_in_the_order_of_tokens() -> Any:
    """Rows are copied in order of the expert, and their scales are those of the row before."""
    original = TokenRows.copies

    def copies(self: TokenRows, tokens: Tensor) -> Tensor:
        found = original(self, tokens)
        return found.roll(1, 0) if tokens.shape[1] == 1 and tokens.dtype == torch.float32 else found

    return patch.object(TokenRows, "copies", copies)


def weights_multiply_outputs() -> Any:
    """Rows are cast before the weight of their token multiplies them: the product is rounded otherwise."""
    original = ExpertCall._outputs

    def outputs(self: ExpertCall, rows: Any, tokens: Any, weight: Tensor, casts: Any) -> Tensor:
        if casts is None or weight is not self.parameters.down:
            return original(self, rows, tokens, weight, casts)
        of_pairs = weights_of_call[-1]
        return original(self, lambda: rows() / of_pairs, tokens, weight, casts) * of_pairs

    weights_of_call, original_sums = list[Tensor](), ExpertCall._sums

    def sums(self: ExpertCall, gate_up: Tensor, weights: Tensor) -> Tensor:
        weights_of_call.append(self.assignments.weights_of(weights))
        return original_sums(self, gate_up, weights)

    @contextmanager
    def both() -> Any:
        with patch.object(ExpertCall, "_outputs", outputs), patch.object(ExpertCall, "_sums", sums):
            yield

    return both()


def factors_of_experts_never_forgotten() -> Any:
    """Factors of weights are remembered for ever, not for one step."""
    return patch.object(MatrixCasts, "begin_step", lambda self: None)


def casts_of_experts_never_forgotten() -> Any:
    """The matrices in eight bits are those of the first step, where several micro-batches share them."""
    return patch.object(MatrixCasts, "begin_step", lambda self: self._factors.clear())


def experts_in_16_bits() -> Any:
    original = Float8Layers.apply

    def apply(self: Float8Layers, *given: Any, **more: Any) -> None:
        original(
            replace(self, names=frozenset(one for one in self.names if one != "1.experts")), *given, **more
        )

    return patch.object(Float8Layers, "apply", apply)


def weight_gradients_of_cast_rows() -> Any:
    """The operands of weight gradients are rounded to float8, too, with a scale for each row."""
    original, form = expert_products.add_grouped_product, expert_casts._RECIPE.input

    def rounded(rows: Tensor) -> Tensor:
        cast = expert_casts.cast_by(
            rows, expert_casts.factor_of(expert_casts.largest_of(rows, "row", 1), form), form
        )
        return cast.data.to(rows.dtype) * cast.scale.to(rows.dtype)

    def add(total: Tensor, left: Tensor, right: Tensor, *more: Any) -> None:
        original(total, rounded(left), rounded(right), *more)

    return patch.object(expert_products, "add_grouped_product", add)


def _row(
    defect: Defect,
    plan: Plan,
    cause: str,
    *,
    phase: StepPhase = StepPhase.FORWARD,
    also: tuple[StepPhase, ...] = (),
    microbatch: int | None = 0,
    step: int = 0,
    model: Case = FOUR_EXPERTS,
    options: VerifyOptions = ONE_STEP,
    full: bool = True,
    layer: str = FIRST,
    unexplained: str = "",
) -> Row:
    named = Named(phase=phase, layer=layer, microbatch=microbatch, step=step, cause=cause, also=also)
    return Row(
        defect=defect,
        model=model,
        plan=plan,
        named=named,
        options=options,
        full=full,
        unexplained=unexplained,
    )


OF_FIRST, OF_SECOND = r"1\.experts\.", r"2\.experts\."
SCALES, OF_GRADIENTS = (StepPhase.SCALES,), (StepPhase.GRADIENT_SCALES,)
BACKWARD = StepPhase.INPUT_GRADIENT
ANOTHER = "another scale than that of the largest value"
FLOAT8_EXPERTS = (
    _row(
        inner_rows_scaled_by_each_rank,
        IN_PARTS,
        f"{OF_FIRST}down_proj is another: .*{OF_PART} etp|{OF_PART} etp",
        also=SCALES,
        microbatch=None,
        full=False,
    ),
    _row(
        gradients_of_rows_scaled_by_each_rank,
        IN_PARTS,
        f"{OF_SECOND}gate_up_proj is another: .*{OF_PART} etp|{OF_PART} etp",
        phase=BACKWARD,
        also=OF_GRADIENTS,
        microbatch=None,
        layer=SECOND,
    ),
    _row(
        rows_cast_to_e5m2,
        ALONE,
        f"the output's gradient of {OF_SECOND}down_proj is cast to float8_e5m2 instead of float8_e4m3fn",
        phase=BACKWARD,
        layer=SECOND,
    ),
    _row(
        scale_of_all_experts,
        DIVIDED,
        f"the weight, for the input gradient of {OF_SECOND}.* is another|{ANOTHER}",
        phase=BACKWARD,
        also=OF_GRADIENTS,
        microbatch=None,
        layer=SECOND,
        full=False,
    ),
    _row(
        outputs_scaled_together,
        ALONE,
        f"the weight of {OF_FIRST}gate_up_proj is another|{ANOTHER}",
        also=SCALES,
    ),
    _row(
        weight_of_experts_scaled_by_each_rank,
        IN_PARTS,
        f"the scale of the weight of {OF_FIRST}down_proj is another: .*{OF_PART} etp|{OF_PART} etp",
        also=SCALES,
        microbatch=None,
    ),
    _row(
        rows_scaled_together,
        DIVIDED,
        f"the scale of the input of {OF_FIRST}gate_up_proj is another",
        also=SCALES,
    ),
    _row(
        largest_value_of_experts_rounded_up,
        ALONE,
        f"the scale of the input of {OF_FIRST}gate_up_proj is another",
    ),
    _row(scales_in_the_order_of_tokens, ALONE, "what experts gives is the first to differ"),
    _row(weights_multiply_outputs, ALONE, "what experts gives is the first to differ"),
    _row(
        casts_of_experts_never_forgotten,
        ALONE,
        "what experts gives is the first to differ",
        step=1,
        options=TWO_STEPS,
    ),
    _row(
        factors_of_experts_never_forgotten,
        replace(ALONE, microbatches=1),  # whose casts are not kept
        "that of the step before",
        step=2,  # where a weight has passed a power of two
        also=SCALES,
        options=TWO_STEPS,
    ),
    _row(experts_in_16_bits, ALONE, "gate_up_proj does not multiply in float8"),
    _row(
        weight_gradients_of_cast_rows,
        ALONE,
        "the gradient of the layer's output is equal, and that of its weight is not",
        phase=StepPhase.WEIGHT_GRADIENT,
        layer=SECOND,
        unexplained="products of two numbers of 8 bits have as few digits as sums in 16 bits",
    ),
)
