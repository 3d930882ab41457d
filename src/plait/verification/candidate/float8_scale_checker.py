"""Checks the scales by which operands are cast to float8 against those of the reference run.

A value that is cast by another scale may be equal by chance, or nearly so: all powers of two give the same
numbers but for the smallest. So scales are compared by themselves, after the values of their layer. Where
those differ, the first wrong scale is named as the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.runner import Runtime
from plait.plan.rules import join
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear
from plait.tensor.autograd.float8_operands import LinearCasts, Operand
from plait.tensor.experts.expert_casts import EXPERT_RECIPE, ExpertCasts, MatrixCasts
from plait.tensor.experts.experts import Experts
from plait.tensor.float8.cast import ScaledMatrix
from plait.verification.candidate.float8_expert_scales import ExpertScales
from plait.verification.candidate.local_activations import ActivationParts
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.definitions.float8 import EightBits, cast_factors_of, operands_of, quantised
from plait.verification.definitions.float8_scale_recorder import noted
from plait.verification.findings import box_of
from plait.verification.reference.recording import NO_TOLERANCE, largest_difference
from plait.verification.reference.values_after_mistakes import NamedTensors, with_other_scales
from plait.verification.step_location import SCALE, Location, RecordKey, RecordScope, StepPhase

FEATURES = "tp"
POSITIONS = "cp"
INNER_FEATURES = "etp"
"""The axes whose ranks may each hold a part of an operand; the last one of an operand of experts."""
OF_TOKENS = ("input", "gradient")
"""Operands with a scale for each token, if not with one for the tensor."""
OF_OUTPUTS = ("weight", "gradient_for_weight")
"""Those with one for each output feature; the others have one for each input feature."""
IN_WORDS: dict[Operand, str] = {
    "input": "the input",
    "weight": "the weight",
    "gradient": "the output's gradient",
    "weight_for_input": "the weight, for the input gradient",
    "gradient_for_weight": "the output's gradient, for the weight gradient",
    "input_for_weight": "the input, for the weight gradient",
}


@dataclass(frozen=True)
class CastOperand:
    """An operand that a linear, or one matrix of experts, has cast to float8, with its scales."""

    path: str
    """Of the linear, or the parameter of the experts, in the model."""
    operand: Operand
    units: Tensor
    """As `noted`; of the rows of experts the counts of those, see `expert_scales`."""
    of_part: Tensor
    """Likewise, by the largest values of what this rank holds of the operand alone."""
    dtype: torch.dtype
    is_transposed: bool
    """Whether the linear's weight is `[in, out]`, or that of each expert."""
    of_experts: bool = False

    @property
    def name(self) -> str:
        """The operand for messages, such as "weight of blocks.0.mlp.up"."""
        return f"{IN_WORDS[self.operand]} of {self.path}"

    @property
    def module(self) -> str:
        """The path of the linear, or of the experts."""
        return self.path.rpartition(".")[0] if self.of_experts else self.path

    @property
    def depends_on_nothing_else(self) -> bool:
        """Whether the operand is the experts' input or weight, whose scale depends on no other cast."""
        is_given = self.operand == "input" and self.path.endswith("gate_up_proj")
        return self.of_experts and (is_given or self.operand not in OF_TOKENS)

    @property
    def is_counted(self) -> bool:
        """Whether the operand is rows of tokens at experts, whose scales are compared by their counts."""
        return self.of_experts and self.operand in OF_TOKENS


class ScaleChecker:
    """Compares the scales of one rank's operands in float8 with the recording of the reference run."""

    def __init__(self, runtime: Runtime, comparison: StepComparison, parts: ActivationParts) -> None:
        self.runtime, self.comparison, self.parts = runtime, comparison, parts
        self.plan, recipe = runtime.blueprint.plan, runtime.blueprint.plan.linears
        self.formats: dict[str, EightBits | None] = {} if recipe is None else operands_of(recipe)
        self.formats_of_experts = operands_of(EXPERT_RECIPE)
        self.experts = ExpertScales(runtime)
        self._cast: list[CastOperand] = []
        """By the layer that runs, in order."""
        self._noting: list[LinearCasts | MatrixCasts] = []

    def begin_step(self) -> None:
        """Start to record the scales of all operands that linears and experts cast to float8.

        Those of experts not in mode native.
        """
        for stage in self.runtime.pipeline.stages.values() if self.formats else ():
            for layer in stage.layers:
                for name, module in layer.module.named_modules():
                    casts: Any = getattr(module, "casts", None)
                    if isinstance(casts, LinearCasts):
                        casts.note = partial(self._note, join(layer.path, name), module)
                        self._noting.append(casts)
                    elif isinstance(casts, ExpertCasts) and self.comparison.options.mode != "native":
                        for matrix, one in (("gate_up_proj", casts.gate_up), ("down_proj", casts.down)):
                            one.note = partial(
                                self._note_experts, join(join(layer.path, name), matrix), module
                            )
                            self._noting.append(one)

    def end_step(self) -> None:
        """Stop recording the scales of operands in float8."""
        while self._noting:
            self._noting.pop().note = None

    def weight_in_float8(self, weight: Tensor) -> Tensor:
        """Return the values, in float64, that a whole weight with one scale has in float8."""
        how = self.formats["weight"]
        assert how is not None
        cast = quantised(weight, how, 1)
        return cast.numbers * cast.unit

    def _note(
        self, path: str, linear: nn.Module, operand: Operand, matrix: Tensor, cast: ScaledMatrix
    ) -> None:
        how = self.formats[operand]
        if how is None or matrix.is_meta:
            return
        summed = 0 if operand.endswith(("_for_weight", "_for_input")) else 1
        was_cast = matrix.dtype == cast.data.dtype  # before it was gathered
        of_part = cast.scale if was_cast else cast_factors_of(matrix, how, summed).reciprocal()
        found = noted(cast.scale), noted(of_part), cast.data.dtype, is_transposed_linear(linear)
        self._cast.append(CastOperand(path, operand, *found))

    def _note_experts(
        self, path: str, experts: Experts, operand: Operand, matrix: Tensor, cast: ScaledMatrix
    ) -> None:
        how = self.formats_of_experts[operand]
        assert how is not None
        of_weight = operand not in OF_TOKENS
        found = noted(cast.scale)
        of_part = noted(
            scales_of_experts(matrix, how) if of_weight else cast_factors_of(matrix, how, 1).reciprocal()
        )
        if not of_weight:
            found, of_part = self.experts.total(found, of_part)
        cast_as = cast.data.dtype, experts.transposed
        self._cast.append(CastOperand(path, operand, found, of_part, *cast_as, of_experts=True))

    def _how(self, cast: CastOperand) -> EightBits | None:
        """Return the 8-bit format in which an operand has to be cast; None if it stays in 16 bits."""
        return (self.formats_of_experts if cast.of_experts else self.formats)[cast.operand]

    def compare(self, layer: int, scope: RecordScope, *, is_forward: bool) -> None:
        """Compare the float8 scales of a layer that has just run on a micro-batch; not in mode native.

        There a difference in the last bit of 16 may double the next scale that is a power of two.
        """
        if self.comparison.options.mode == "native":
            self._cast.clear()
        phase = StepPhase.SCALES if is_forward else StepPhase.GRADIENT_SCALES
        for number, cast in enumerate(self._cast):
            expected, how = self._expected(cast, layer, scope), self._how(cast)
            if expected is None or how is None:
                continue
            at = Location(
                scope.step, phase, layer, scope.microbatch, cast.name, number, evaluating=scope.evaluated
            )
            tolerance = self.comparison.recording.tolerances[scope][_key(cast)]
            mistakes = self._after_mistakes(cast, expected, layer, scope)
            self.comparison.findings.compare(at, cast.units, expected, tolerance, alternatives=mistakes)
            if cast.dtype != how.dtype:
                actual, right = (torch.zeros(1, dtype=dtype) for dtype in (cast.dtype, how.dtype))
                self.comparison.findings.compare(at, actual, right, NO_TOLERANCE)
        self._cast.clear()

    def mistake(
        self, layer: int, scope: RecordScope, is_given: Callable[[str], bool], *, is_forward: bool
    ) -> str | None:
        """Return a sentence on the first wrong cast of the layer that has just run, if the cause is known.

        `is_given`: whether the linear at a path is given what it should be.
        """
        left_out = next(self._left_out(layer, scope), None) if is_forward else None
        if left_out is not None:
            return f"{left_out} does not multiply in float8"
        for cast in self._cast:
            expected, how = self._expected(cast, layer, scope), self._how(cast)
            if how is None or not self._is_recorded(cast.path, scope):
                return f"{cast.path} multiplies in float8, and is to stay as it is"
            if expected is None:
                continue
            if cast.dtype != how.dtype:
                return f"{cast.name} is cast to {_named(cast.dtype)} instead of {_named(how.dtype)}"
            allowed = self.comparison.recording.tolerances[scope][_key(cast)].allowed
            fits = cast.units.shape == expected.shape
            if fits and largest_difference(cast.units, expected) <= allowed:
                continue
            if cast.operand == "input" and not is_given(cast.module):
                return None
            if not fits:
                counts = f"{len(cast.units)} scales instead of {len(expected)}"
                return f"{cast.name} is cast with {counts}: along another dim, or not as a whole"
            for sentence, units in self._after_mistakes(cast, expected, layer, scope):
                if largest_difference(cast.units, units) <= allowed:
                    return f"the scale of {cast.name} is another: {sentence}"
            return f"the scale of {cast.name} is another" if cast.depends_on_nothing_else else None
        return None

    def _left_out(self, layer: int, scope: RecordScope) -> Iterator[str]:
        """Yield linears of a layer that have cast nothing, where others have, and the reference has all.

        Experts likewise, also where nothing else has: they are noted in compiled layers, too.
        """
        within = f"{self.comparison.sequence.layers[layer].path}."
        found, notes_linears = (
            {cast.path for cast in self._cast},
            not all(cast.of_experts for cast in self._cast),
        )
        for key in self.comparison.recording.values[scope]:
            path, _, operand = key.name.partition("|")
            if key.kind != SCALE or operand != "weight" or not path.startswith(within):
                continue
            if path not in found and (notes_linears or path in self.experts.layouts):
                yield path

    def _is_recorded(self, path: str, scope: RecordScope) -> bool:
        """Return whether the reference has the linear at `path` in float8."""
        return RecordKey(SCALE, name=f"{path}|weight") in self.comparison.recording.values[scope]

    def _expected(self, cast: CastOperand, layer: int, scope: RecordScope) -> Tensor | None:
        """Return this rank's part of the recorded scales of an operand, or None if there are none."""
        if cast.is_counted:
            return self._expected_counts(cast, scope)
        recorded = self.comparison.recording.find(scope, _key(cast))
        return None if recorded is None or not len(recorded) else self._part(cast, recorded, layer, scope)

    def _expected_counts(self, cast: CastOperand, scope: RecordScope) -> Tensor | None:
        """Return the counts of the recorded scales of rows of experts, or None if there are none."""
        together = [scope._replace(microbatch=one) for one in self.experts.microbatches(scope.microbatch)]
        tables = [self.comparison.recording.find(one, _key(cast)) for one in together]
        found = [one for one in tables if one is not None and len(one)]
        return self.experts.counts(found) if len(found) == len(together) else None

    def _part(self, cast: CastOperand, recorded: Tensor, layer: int, scope: RecordScope) -> Tensor:
        """Return this rank's part of scales `[count]`, each of a token or a feature; all where all fit."""
        if cast.of_experts:
            return self.experts.of_weight(cast.path, recorded, is_transposed=cast.is_transposed)
        count = len(cast.units)
        if len(recorded) == count:
            return recorded
        if cast.operand in OF_TOKENS:
            given = self.comparison.recording.find(scope, RecordKey("output", layer - 1, "0"))
            rows = 1 if given is None else len(given)
            by_position = recorded.view(rows, -1, 1)
            return self.parts.of_tokens(by_position.shape, count).of(by_position).flatten()
        layout = self.runtime.blueprint.whole_layouts[join(cast.path, "weight")]
        dim = int((cast.operand in OF_OUTPUTS) == cast.is_transposed)
        whole = recorded.unsqueeze(1 - dim).expand(layout.shape)
        return box_of(layout, self.runtime.mesh.coordinate).of(whole).select(1 - dim, 0)

    def _after_mistakes(
        self, cast: CastOperand, expected: Tensor, layer: int, scope: RecordScope
    ) -> NamedTensors:
        """Yield the scales that an operand has after common mistakes."""
        how, recording = self._how(cast), self.comparison.recording
        assert how is not None
        axes = self._dividing(cast)
        if axes and cast.of_part.shape == expected.shape and not torch.equal(cast.of_part, expected):
            over = " and ".join(axes)
            yield f"it is that of this rank's part: largest values are not reduced over {over}", cast.of_part
        if cast.is_counted:
            return
        each = self.plan.microbatches
        first = scope.microbatch - scope.microbatch % each
        for number in range(first, first + each):
            other = recording.find(scope._replace(microbatch=number), _key(cast))
            if other is not None and number != scope.microbatch:
                yield f"it is that of micro-batch {number}", self._part(cast, other, layer, scope)
        before = recording.find(scope._replace(step=scope.step - 1, evaluated=False), _key(cast))
        if before is not None:
            yield "it is that of the step before", self._part(cast, before, layer, scope)
        for one in self._cast:
            scales = self._expected(one, layer, scope) if one.operand == cast.operand else None
            if scales is not None and one.path != cast.path and scales.shape == expected.shape:
                yield f"it is that of {one.name}", scales
        together = list(self._of_all_ranks(cast, scope))
        if len(together) > 1:
            largest = torch.stack(together).amax(0)
            text = "it is that of the micro-batches of all ranks of dp, over which nothing is reduced"
            yield text, self._part(cast, largest, layer, scope)
        yield from with_other_scales(cast.units, expected, how)

    def _dividing(self, cast: CastOperand) -> list[str]:
        """Return the axes whose ranks hold other parts of an operand."""
        if cast.of_experts:
            return [INNER_FEATURES] if self.plan.etp > 1 else []
        return [axis for axis in (FEATURES, POSITIONS) if self.runtime.mesh.size(axis) > 1]

    def _of_all_ranks(self, cast: CastOperand, scope: RecordScope) -> Iterator[Tensor]:
        """Yield the recorded scales of the micro-batches that all ranks of dp run at the same time."""
        each = self.plan.microbatches
        for rank in range(self.plan.dp):
            same = scope._replace(microbatch=rank * each + scope.microbatch % each)
            found = self.comparison.recording.find(same, _key(cast))
            if found is not None:
                yield found


def scales_of_experts(weight: Tensor, how: EightBits) -> Tensor:
    """Return the scales of experts' weights `[experts, out, in]` in float8, from this tensor's values alone.

    What a number of 1 stands for: the reciprocals of `cast_factors_of`.
    """
    if not len(weight):
        return weight.new_zeros(0)
    each = [cast_factors_of(one.T, how, 0) for one in weight.unbind()]
    return torch.stack([one.reciprocal() for one in each])


def _key(cast: CastOperand) -> RecordKey:
    return RecordKey(SCALE, name=f"{cast.path}|{cast.operand}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
