"""Comparison of each parameter's gradient with its expected value after every addition of a step.

Some weight gradients are added by `I` (norms, biases: with the layer's backward), others by `W` (deferred),
a few in part by each. The values show which: after `I` a gradient contains the micro-batch's contribution, or
is unchanged, or is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.engine.runner import Runtime
from plait.plan.axes import EXPERT_DATA_AXES
from plait.ranks.collectives import all_reduce
from plait.ranks.group import Group
from plait.schedules.action import Kind
from plait.tensor.parallel.partition import is_sharded
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.expected_dtypes import epsilon_of
from plait.verification.findings import ComparedBox, box_of
from plait.verification.reference.differences_within_layers import InnerDifference
from plait.verification.reference.recording import (
    NO_TOLERANCE,
    Tolerance,
    largest_difference,
    largest_magnitude,
)
from plait.verification.step_location import Location, RecordKey, RecordScope, StepPhase

GradientKey = tuple[str, int]
"""Name of a parameter, and the first of the rank's stages that add to this gradient of it."""
ParameterUse = tuple[int, int]
"""A layer of the model, and a micro-batch of the global batch."""
FindInside = Callable[[], InnerDifference | None]
"""Returns what is the first to differ inside a layer, if that is known."""


def unknown() -> None:
    """Return None: the default of a search for the first module that differs."""


@dataclass(frozen=True)
class Contribution:
    """What a layer's backward of one micro-batch adds to a parameter's gradient, with a tolerance."""

    value: Tensor
    tolerance: Tolerance
    partial: bool = False
    """Whether `I` has added a part of the value."""


@dataclass(frozen=True)
class TrackedGradient:
    """An accumulated gradient of a parameter, actual and expected, with a tolerance."""

    actual: Tensor
    expected: Tensor
    tolerance: Tolerance

    @property
    def equal(self) -> bool:
        """Whether actual and expected gradient are equal up to the tolerance."""
        return largest_difference(self.actual, self.expected) <= self.tolerance.allowed


@dataclass
class GradientTracker:
    """Computes what a rank's accumulated gradients should be after each backward of a layer."""

    gradients: Mapping[GradientKey, Tensor]
    """The accumulated gradients of the engine."""
    epsilon: float
    total: Callable[[str, Tensor], Tensor] = lambda _, gradient: gradient
    """Returns the sum of a parameter's gradient over the ranks that add to it in this backward; equal on all
    of them."""
    settled: dict[GradientKey, tuple[Tensor, Tolerance]] = field(default_factory=dict)
    """The expected value from contributions that are known to be added."""
    open: dict[GradientKey, dict[ParameterUse, Contribution]] = field(default_factory=dict)
    """Contributions of uses whose `I` is done, and whose `W` may still follow."""

    def begin_step(self) -> None:
        """Expect all gradients to be zero, as at the start of a step."""
        self.settled.clear()
        self.open.clear()

    def after_input(
        self,
        gradient: GradientKey,
        use: ParameterUse,
        contribution: Tensor,
        tolerance: Tolerance,
        *,
        until_weight: bool,
    ) -> TrackedGradient | None:
        """After an action `I`, record what it adds to a gradient; return what to compare, None before `W`.

        `until_weight`: leave the comparison to `W`. Else it is compared where all is added by now: where the
        gradient is right with this contribution, and not without it.
        """
        own = self.open.setdefault(gradient, {})
        own[use] = Contribution(contribution, tolerance)
        if until_weight:
            return None
        unchanged, added = self._tracked(gradient, []), self._tracked(gradient, [use])
        if added.equal and not unchanged.equal:
            return self._settle(gradient, [use], added)
        if not unchanged.equal:
            own[use] = Contribution(contribution, tolerance, partial=True)
        return None

    def after_weight(self, gradient: GradientKey, use: ParameterUse) -> TrackedGradient | None:
        """Return the gradient to compare after the weight backward `W`; None if there is nothing to compare.

        None where `I` had added the whole contribution, and `W` rightly nothing; and where the contribution
        of another use is only partly added.
        """
        own = self.open.get(gradient, {})
        if use not in own:
            if any(other.partial for other in own.values()):
                return None
            tracked = self._tracked(gradient, [])  # I added the contribution, and W must not add it again
            return None if tracked.equal else tracked
        uses, tracked = [use], self._tracked(gradient, [use])
        if not tracked.equal and any(other.partial for key, other in own.items() if key != use):
            uses, tracked = list(own), self._tracked(gradient, list(own))
            if not tracked.equal:
                return None
        return self._settle(gradient, uses, tracked)

    def open_gradients(
        self, keys: Iterable[GradientKey]
    ) -> Iterator[tuple[GradientKey, ParameterUse, TrackedGradient]]:
        """Yield gradients that await a weight backward `W`, as expected after `W`; mark them as done."""
        for gradient in keys:
            if self.open.get(gradient):
                tracked = self._tracked(gradient, self.open[gradient])
                yield gradient, next(iter(self.open.pop(gradient))), tracked

    def reset(self, keys: Iterable[GradientKey]) -> None:
        """Expect zero gradients, since they were reduced; keep what actions `W` may still add."""
        for gradient in keys:
            self.settled.pop(gradient, None)

    def accept(self, gradient: GradientKey, *, exactly: bool = False) -> None:
        """Take the gradient as it is for the expected one, `exactly` or within the tolerance so far."""
        tracked = self._tracked(gradient, [])
        tolerance = Tolerance(tracked.tolerance.size, 0.0) if exactly else tracked.tolerance
        self.settled[gradient] = tracked.actual.detach().clone(), tolerance

    def is_partial(self, gradient: GradientKey) -> bool:
        """Return whether a layer's `I` has added a part of its gradient, and its `W` will add the rest."""
        return any(use.partial for use in self.open.get(gradient, {}).values())

    def allowed(self, name: str) -> float:
        """Return the sum of the tolerances of a parameter's gradients, over this rank's stages."""
        return sum(tolerance.allowed for (own, _), (_, tolerance) in self.settled.items() if own == name)

    def _tracked(self, gradient: GradientKey, uses: Iterable[ParameterUse]) -> TrackedGradient:
        actual = self.total(gradient[0], self.gradients[gradient])
        before = self.settled.get(gradient)
        total, (size, allowed) = before or (actual.new_zeros(()).expand_as(actual), NO_TOLERANCE)
        for use in uses:
            value, tolerance = self.open[gradient][use].value, self.open[gradient][use].tolerance
            total = total + value
            size = max(size, tolerance.size, largest_magnitude(total))
            allowed += tolerance.allowed + self.epsilon * size
        return TrackedGradient(actual, total, Tolerance(size, allowed))

    def _settle(
        self, gradient: GradientKey, uses: Iterable[ParameterUse], tracked: TrackedGradient
    ) -> TrackedGradient:
        self.settled[gradient] = tracked.expected, tracked.tolerance
        for use in uses:
            del self.open[gradient][use]
        return tracked


def sum_over(group: Group, gradient: Tensor) -> Tensor:
    """Return the sum of a gradient over the ranks of a group.

    Communication: one all-reduce of 8 bytes an element, unless this rank is alone. The ranks compare the same
    gradients in the same order, for what they do next depends on sums alone, which are equal.
    """
    if group.size == 1:
        return gradient
    copied = gradient.to(torch.float64, copy=True)  # the sum is written to it
    return all_reduce(copied, group, checked=False).wait().to(gradient.dtype)


class WeightGradientChecker:
    """Compares a rank's accumulated gradients with the reference run's after each backward of a layer."""

    def __init__(self, runtime: Runtime, comparison: StepComparison) -> None:
        self.runtime, self.blueprint = runtime, runtime.blueprint
        self.comparison = comparison
        self.recording = comparison.recording
        self.isolate = comparison.options.isolate
        self.resynchronizes = comparison.resynchronizes
        self.step = -1
        self.adds_late = runtime.queue.adds_late
        gradients: dict[GradientKey, Tensor] = {}
        self.gradients_of: dict[tuple[int, int], list[GradientKey]] = {}
        """By stage and layer, the gradients that a backward adds to, except those summed over tp later."""
        for stage in runtime.pipeline.stages.values():
            units = [unit for unit in runtime.units.values() if stage.number in unit.stages]
            keys = {key[0]: key for unit in units for key in unit.gradients_of(stage.number)}
            names = {id(p): name for unit in units for name, p in unit.parameters_of(stage.number).items()}
            gradients |= {key: one for unit in units for key, one in unit.gradients_of(stage.number).items()}
            for number, layer in enumerate(stage.layers):
                used = [names[id(p)] for p in layer.module.parameters() if id(p) in names]
                in_model = self.blueprint.stage_layers[stage.number][number]
                if any(is_sharded(self.blueprint.whole_layouts[name]) for name in used):
                    comparison.findings.partitioned.add(in_model)
                if any(map(self._is_divided, used)):
                    comparison.findings.with_experts.add(in_model)
                trained = (names[id(p)] for p in layer.module.parameters() if p.requires_grad)
                complete = [keys[name] for name in trained if self._is_complete(name)]
                self.gradients_of[stage.number, number] = complete
        self.tracker = GradientTracker(gradients, 8 * comparison.gradient_epsilon, self._total)

    def begin_step(self, step: int) -> None:
        """Start a step: expect all gradients to be zero."""
        self.step = step
        self.tracker.begin_step()

    def after_backward(
        self, kind: Kind, stage: int, layer: int, use: ParameterUse, inside: FindInside = unknown
    ) -> None:
        """Compare the parameter gradients that a layer's backward (`I`, `W` or `B`) has added to.

        `inside` finds what is the first to differ inside the layer.
        """
        own = self.runtime.pipeline.stages[stage].layers[layer].module.parameters()
        self.runtime.queue.set_to_zero(own)  # to which nothing was added yet
        late = kind is Kind.B or self.adds_late
        for key in self.gradients_of[stage, layer]:
            contribution = None if kind is Kind.W else self._contribution(key[0], use)
            if contribution is not None:
                added = self.tracker.after_input(key, use, *contribution, until_weight=late)
                self._compare(key, use, added, inside)
            if kind is not Kind.I:
                self._compare(key, use, self.tracker.after_weight(key, use), inside)

    def before_scatter(self, parameters: Iterable[str]) -> None:
        """Compare gradients before their reduction, after which they are expected to be zero."""
        names = set(parameters)
        keys = [key for key in self.tracker.gradients if key[0] in names]
        if not self.adds_late:  # else open contributions are added after the reduction
            self.compare_open(keys)
        self.tracker.reset(keys)

    def compare_open(self, keys: Iterable[GradientKey] | None = None) -> None:
        """Compare gradients (None: all) that await a weight backward `W`, as expected after `W`."""
        keys = self.tracker.gradients if keys is None else keys
        for key, use, tracked in list(self.tracker.open_gradients(keys)):
            self._compare(key, use, tracked)

    def tolerance_of(self, name: str) -> float:
        """Return the tolerance of this rank's gradient of a parameter in a step, before its reduction."""
        if self._is_complete(name):
            return self.tracker.allowed(name)
        return sum(
            tolerance.allowed
            for scope, tolerances in self.recording.tolerances.items()
            for key, tolerance in tolerances.items()
            if scope.step == self.step and key.kind == "contribution" and key.name == name
        )

    def box(self, name: str) -> ComparedBox:
        """Return which part of a parameter this rank's layers use: divided over `tp`, not sharded."""
        return box_of(self.blueprint.whole_layouts[name], self.runtime.mesh.coordinate)

    def _compare(
        self,
        key: GradientKey,
        use: ParameterUse,
        tracked: TrackedGradient | None,
        inside: FindInside = unknown,
    ) -> None:
        if tracked is None:
            return
        name, _ = key
        contribution = self._contribution(name, use)
        expected, rounding = tracked.expected, None
        if self.resynchronizes:
            parameter, formats = self.comparison.sequence.parameters[name], self.comparison.formats
            dtype = formats.gradient_of(parameter)
            expected, rounding = expected.to(dtype), epsilon_of(dtype)
            # A sum of a few products, each rounded as it was computed, or one where the reference has a few.
            if self._adding(name).size > 1 or self._is_divided(name):
                rounding = max(rounding, epsilon_of(formats.compute_of(parameter)))
        equal = self.comparison.findings.compare(
            Location(self.step, StepPhase.WEIGHT_GRADIENT, *use, name),
            tracked.actual,
            expected,
            tracked.tolerance,
            box=self.box(name),
            alternatives=self._alternatives(name, use, tracked.expected),
            base=None if contribution is None else tracked.expected - contribution[0],
            rounding=rounding,
            inside=inside,
        )
        if not equal and not self.isolate:
            self.tracker.accept(key)
        elif not equal:
            self._overwrite(key, expected)
        elif self.resynchronizes and not self.tracker.is_partial(key):
            self._overwrite(key, expected)
            self.tracker.accept(key, exactly=True)

    def _overwrite(self, key: GradientKey, expected: Tensor) -> None:
        """Overwrite a gradient, so that its sum over the ranks that add to it is `expected`."""
        own = self.tracker.gradients[key]
        own.copy_(expected if self._adding(key[0]).index == 0 else torch.zeros_like(expected))

    def _total(self, name: str, gradient: Tensor) -> Tensor:
        return sum_over(self._adding(name), gradient)

    def _adding(self, name: str) -> Group:
        """Return the ranks whose tokens' gradients add up to `_contribution`.

        Those of `cp`, which add what their positions give; for divided experts, all that hold them: tokens
        of other data-parallel ranks reach them, too. Of some adapters each rank of `etp` has a summand.
        """
        if not self._is_divided(name):
            return self.runtime.mesh.group("cp")
        copies = ("etp",) if "etp" in self.blueprint.kinds[name].reduced_over else ()
        return self.runtime.mesh.group((*EXPERT_DATA_AXES, *copies))

    def _is_divided(self, name: str) -> bool:
        """Return whether a parameter belongs to experts that are divided over `ep` or `etp`."""
        return "ep" in self.blueprint.whole_layouts[name].axes

    def _alternatives(self, name: str, use: ParameterUse, expected: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the values that the gradient would have after common mistakes."""
        own, (layer, microbatch) = self._contribution(name, use), use
        if own is not None:
            yield "it was not added at all", expected - own[0]
            yield "it was added twice", expected + own[0]
            for other in range(self.recording.microbatches(self.step)):
                found = self._contribution(name, (layer, other))
                if other != microbatch and found is not None:
                    text = f"what was added is that of micro-batch {other}"
                    yield text, expected - own[0] + found[0]
        before = self.recording.find(RecordScope(self.step - 1), RecordKey("clipped", name=name))
        if before is not None:
            yield "the gradient of the step before is still in it", expected + self.box(name).of(before)

    def _contribution(self, name: str, use: ParameterUse) -> tuple[Tensor, Tolerance] | None:
        """Return this rank's shard of the recorded gradient from one layer and micro-batch, or None.

        Of divided experts, that of the micro-batches that data-parallel ranks run at the same time.
        """
        layer, microbatch = use
        key, plan = RecordKey("contribution", layer, name), self.blueprint.plan
        together = [microbatch]
        if self._is_divided(name):
            together = [rank * plan.microbatches + microbatch % plan.microbatches for rank in range(plan.dp)]
        total, (size, allowed) = None, NO_TOLERANCE
        for number in together:
            scope = RecordScope(self.step, number)
            whole = self.recording.find(scope, key)
            if whole is None:
                return None
            value, tolerance = self.box(name).of(whole), self.recording.tolerances[scope][key]
            if len(together) > 1:  # in 16 bits their sum would be rounded
                value = value.to(torch.promote_types(value.dtype, torch.float32))
            total = value if total is None else total + value
            size, allowed = max(size, tolerance.size), allowed + tolerance.allowed
        return None if total is None else (total, Tolerance(size, allowed))

    def _is_complete(self, name: str) -> bool:
        """Return whether a gradient is complete without a sum over `tp`."""
        return self.blueprint.kinds[name].summands == 1
