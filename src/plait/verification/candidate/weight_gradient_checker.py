"""Comparison of each parameter's gradient with the recorded contributions after every addition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from plait.engine.runtime import Runtime
from plait.ranks.collectives import all_reduce
from plait.schedules.action import Kind
from plait.tensor.parallel.partition import is_sharded
from plait.verification.candidate.gradient_tracker import (
    GradientKey,
    GradientTracker,
    ParameterUse,
    TrackedGradient,
)
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.expected_dtypes import epsilon_of
from plait.verification.findings import Piece, piece_of
from plait.verification.location import Location, RecordKey, RecordScope, StepPhase
from plait.verification.reference.recording import Tolerance


class WeightGradientChecker:
    """Compares a rank's accumulated gradients with the reference run's after each backward of a layer."""

    def __init__(self, runtime: Runtime, comparison: StepComparison) -> None:
        self.runtime, self.blueprint = runtime, runtime.blueprint
        self.comparison = comparison
        self.recording = comparison.recording
        self.isolate = comparison.options.isolate
        self.resynchronizes = comparison.resynchronizes
        self.step = -1
        self.adds_late = any(stage.adds_late for stage in runtime.pipeline.stages.values())
        gradients: dict[GradientKey, Tensor] = {}
        self.gradients_of: dict[tuple[int, int], list[GradientKey]] = {}
        """By stage and layer, the gradients that a backward adds to, except those summed over tp later."""
        for stage in runtime.pipeline.stages.values():
            units = [unit for unit in runtime.units.values() if stage.number in unit.stages]
            keys = {key[0]: key for unit in units for key in unit.gradients_of(stage.number)}
            names = {id(p): name for unit in units for name, p in unit.parameters_of(stage.number).items()}
            for unit in units:
                gradients |= unit.gradients_of(stage.number)
            for number, layer in enumerate(stage.layers):
                used = (names[id(p)] for p in layer.module.parameters() if id(p) in names)
                if any(is_sharded(self.blueprint.whole_layouts[name]) for name in used):
                    comparison.findings.partitioned.add(self.blueprint.stage_layers[stage.number][number])
                trained = (names[id(p)] for p in layer.module.parameters() if p.requires_grad)
                self.gradients_of[stage.number, number] = [
                    keys[name] for name in trained if self._is_complete(name)
                ]
        self.tracker = GradientTracker(gradients, 8 * comparison.gradient_epsilon, self._sum_over_cp)

    def begin_step(self, step: int) -> None:
        """Start a step: expect all gradients to be zero."""
        self.step = step
        self.tracker.begin_step()

    def after_backward(self, kind: Kind, stage: int, layer: int, use: ParameterUse) -> None:
        """Compare the parameter gradients that a layer's backward (`I`, `W` or `B`) has added to."""
        own = self.runtime.pipeline.stages[stage].layers[layer].module.parameters()
        self.runtime.queue.set_to_zero(own)  # to which nothing was added yet
        for key in self.gradients_of[stage, layer]:
            if kind is not Kind.W:
                contribution = self._contribution(key[0], use)
                if contribution is not None:
                    late = kind is Kind.B or self.adds_late
                    self._compare(
                        key, use, self.tracker.after_input(key, use, *contribution, until_weight=late)
                    )
        for key in self.gradients_of[stage, layer]:
            if kind is not Kind.I:
                self._compare(key, use, self.tracker.after_weight(key, use))

    def before_scatter(self, parameters: Iterable[str]) -> None:
        """Compare gradients before their reduction, unless `W` adds to them after it; then expect zeros."""
        names = set(parameters)
        keys = [key for key in self.tracker.gradients if key[0] in names]
        if not self.adds_late:  # else open contributions are added after the reduction
            self.compare_open(keys)
        self.tracker.reset(keys)

    def compare_open(self, keys: Iterable[GradientKey] | None = None) -> None:
        """Compare the gradients of `keys` (None: of all) for which `tracker.open` holds contributions."""
        for key, use, tracked in list(
            self.tracker.open_gradients(self.tracker.gradients if keys is None else keys)
        ):
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

    def piece(self, name: str) -> Piece:
        """Return this rank's piece of a parameter as layers use it: partitioned over tp but not sharded."""
        return piece_of(self.blueprint.whole_layouts[name], self.runtime.mesh.coordinate)

    def _compare(self, key: GradientKey, use: ParameterUse, tracked: TrackedGradient | None) -> None:
        if tracked is None:
            return
        name, _ = key
        contribution = self._contribution(name, use)
        expected, rounding = tracked.expected, None
        if self.resynchronizes:
            parameter, formats = self.comparison.sequence.parameters[name], self.comparison.formats
            dtype = formats.gradient_of(parameter)
            expected, rounding = expected.to(dtype), epsilon_of(dtype)
            if self.runtime.mesh.size("cp") > 1:  # a sum of a few products, each rounded as it was computed
                rounding = max(rounding, epsilon_of(formats.compute_of(parameter)))
        equal = self.comparison.findings.compare(
            Location(self.step, StepPhase.WEIGHT_GRADIENT, *use, name),
            tracked.actual,
            expected,
            tracked.tolerance,
            piece=self.piece(name),
            alternatives=lambda: self._alternatives(name, use, tracked.expected),
            base=None if contribution is None else tracked.expected - contribution[0],
            rounding=rounding,
        )
        if not equal and not self.isolate:
            self.tracker.accept(key)
        elif not equal:
            self._overwrite(key, expected)
        elif self.resynchronizes and not self.tracker.is_partial(key):
            self._overwrite(key, expected)
            self.tracker.accept(key, exactly=True)

    def _sum_over_cp(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over `cp`, whose ranks add what their positions give.

        Communication: one all-reduce of 8 bytes an element over `cp`. Its ranks compare the same gradients in
        the same order, for what they do next depends on sums alone, which are equal.
        """
        group = self.runtime.mesh.group("cp")
        if group.size == 1:
            return gradient
        copied = gradient.to(torch.float64, copy=True)  # the sum is written to it
        return all_reduce(copied, group, checked=False).wait().to(gradient.dtype)

    def _overwrite(self, key: GradientKey, expected: Tensor) -> None:
        """Overwrite a gradient, so that its sum over `cp` is `expected`."""
        own = self.tracker.gradients[key]
        own.copy_(expected if self.runtime.mesh.index("cp") == 0 else torch.zeros_like(expected))

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
            yield "the gradient of the step before is still in it", expected + self.piece(name).of(before)

    def _contribution(self, name: str, use: ParameterUse) -> tuple[Tensor, Tolerance] | None:
        """Return this rank's piece of the recorded gradient from one layer and micro-batch, or None."""
        layer, microbatch = use
        scope, key = RecordScope(self.step, microbatch), RecordKey("contribution", layer, name)
        whole = self.recording.find(scope, key)
        return None if whole is None else (self.piece(name).of(whole), self.recording.tolerances[scope][key])

    def _is_complete(self, name: str) -> bool:
        """Return whether a gradient is complete without a sum over `tp`."""
        return self.blueprint.summed[name] == 1
