"""Looks at what each instruction of a step gave, and compares it with the recording.

Every value is looked at right after it was made, before anything else can write to its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from plait.engine import Runtime
from plait.layers.nested import Value, tensors_of
from plait.layout import divide, shard
from plait.schedules.action import Action, Kind
from plait.schedules.program import (
    AwaitParameters,
    AwaitReceive,
    ComputeLoss,
    Finish,
    Instruction,
    LocalTransfer,
    RunLayer,
    ScatterGradient,
    SeedGradient,
    TakeBatch,
)
from plait.tensor.partition import is_cut
from plait.verification.diagnosis.alternatives import with_another_loss, with_other_parameters
from plait.verification.findings import Findings, Origin, origin_of
from plait.verification.formats import epsilon_of
from plait.verification.gradient_tracker import GradientKey, GradientTracker, ParameterUse, TrackedGradient
from plait.verification.location import WHOLE_STEP, Location, RecordKey, RecordScope, StepPhase
from plait.verification.reference_recording import NO_TOLERANCE, ReferenceRecording, Tolerance
from plait.verification.sketches import InnerDifference, ModuleSketches, first_inner_difference

Named = Iterator[tuple[str, Tensor]]


class InstructionChecker:
    """Compares one rank's steps; `findings` is what comes of it."""

    def __init__(
        self,
        runtime: Runtime,
        recording: ReferenceRecording,
        findings: Findings,
        *,
        epsilon: float,
        isolate: bool,
        dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]] | None = None,
    ) -> None:
        """`epsilon` is that of the gradients' dtype, 0 where all is exact (and nothing is sketched).

        With `dtypes`, of each parameter as layers use it and of its gradient, the run goes on with the
        reference's gradients and parameters where they are equal (see `VerifyOptions.resynchronizes`).
        """
        self.runtime = runtime
        self.dtypes = dtypes
        self.recording = recording
        self.findings = findings
        self.isolate = isolate
        self.looks_inside = epsilon > 0
        self.step = -1
        self.targets: list[Value] = []
        """Of this rank's micro-batches, as they should be."""
        self.sketches: dict[tuple[int, int], ModuleSketches] = {}
        """By stage and layer."""
        self.adds_late = any(stage.adds_late for stage in runtime.pipeline.stages.values())
        gradients: dict[GradientKey, Tensor] = {}
        self.uses: dict[tuple[int, int], list[GradientKey]] = {}
        """By stage and layer, what its backward adds to."""
        for stage in runtime.pipeline.stages.values():
            units = [unit for unit in runtime.units.values() if stage.number in unit.stages]
            sums = {which[0]: which for unit in units for which in unit.gradients_of(stage.number)}
            names = {id(p): name for unit in units for name, p in unit.parameters_of(stage.number).items()}
            for unit in units:
                gradients |= unit.gradients_of(stage.number)
            for number, layer in enumerate(stage.layers):
                used = (names[id(p)] for p in layer.module.parameters() if id(p) in names)
                if any(is_cut(runtime.blueprint.whole_layouts[name]) for name in used):
                    findings.partitioned.add(self._layer(stage.number) + number)
                trained = (names[id(p)] for p in layer.module.parameters() if p.requires_grad)
                self.uses[stage.number, number] = [sums[name] for name in trained if self._is_local(name)]
        self.tracker = GradientTracker(gradients, 8 * epsilon)

    def begin(self, step: int, targets: list[Value]) -> None:
        """Start a step. `targets`: of each of this rank's micro-batches, as they should be."""
        self.step, self.targets = step, targets
        self.tracker.begin_step()
        if self.looks_inside:
            self.sketches = {
                (stage.number, number): ModuleSketches(layer.module)
                for stage in self.runtime.pipeline.stages.values()
                for number, layer in enumerate(stage.layers)
            }

    def __call__(self, instruction: Instruction, runtime: Runtime) -> None:
        """After an instruction: compare what it gave."""
        match instruction:
            case TakeBatch(action):
                self._value(StepPhase.INPUT, action, -1)
            case AwaitReceive(action) | LocalTransfer(action) if action.kind is Kind.F:
                self._value(StepPhase.MESSAGE, action, self._layer(action.stage) - 1)
            case AwaitReceive(action) | LocalTransfer(action):
                self._gradient(StepPhase.GRADIENT_MESSAGE, action, self._layer(action.stage + 1) - 1)
            case AwaitParameters(unit):
                self._parameters(unit)
            case RunLayer(action, layer) if action.kind is Kind.F:
                self._value(StepPhase.FORWARD, action, self._layer(action.stage) + layer)
                self._forget_sketches()
            case RunLayer(action, layer):
                self._backward(action, layer)
                self._forget_sketches()  # of what was recomputed
            case ComputeLoss(action):
                total = runtime.pipeline.loss_stage.total(action.microbatch)
                self._compare(StepPhase.LOSS, action, None, RecordKey("total"), total)
            case SeedGradient(action):
                self._gradient(StepPhase.LOSS_GRADIENT, action, sum(runtime.blueprint.layers_per_stage) - 1)
            case ScatterGradient(unit):
                names = runtime.units[unit].parameters
                sums = [which for which in self.tracker.gradients if which[0] in names]
                if not self.adds_late:  # else what was added is certain, and the rest is still to come
                    self._left(sums)
                self.tracker.reset(sums)
            case Finish():
                self._left(self.tracker.gradients)
                while self.sketches:
                    self.sketches.popitem()[1].close()
            case _:
                pass

    def _parameters(self, unit: str) -> None:
        """Compare what was gathered with what the step before left."""
        users = self.runtime.blueprint.lowering_spec.units[unit]
        layer = min(self._layer(user.stage) + user.layer for user in users)
        for name, parameter in self.runtime.units[unit].parameters.items():
            self._parameter(name, parameter, layer)

    def _parameter(self, name: str, parameter: Tensor, layer: int) -> None:
        scope, key = RecordScope(self.step - 1, WHOLE_STEP), RecordKey("value", name=name)
        expected, tolerance = self.recording.values[scope][key], self.recording.tolerances[scope][key]
        expected = self.piece(name, expected)
        if self.dtypes is not None:  # then the optimizer's parameters are the reference's
            expected, tolerance = expected.to(self.dtypes[name][0]), NO_TOLERANCE

        def alternatives() -> Named:
            before = self.recording.values.get(RecordScope(self.step - 2, WHOLE_STEP), {}).get(key)
            if before is not None:
                text = "what differs is as it was before the last step of the optimizer"
                is_right = (parameter.detach() - expected).abs() <= tolerance.allowed
                yield text, torch.where(is_right, expected, self.piece(name, before).to(expected))

        equal = self.findings.compare(
            Location(self.step, StepPhase.PARAMETERS, layer, name=name),
            parameter,
            expected,
            tolerance,
            origin=origin_of(self.runtime.blueprint.whole_layouts[name], self.runtime.mesh.coordinate),
            alternatives=alternatives,
        )
        if not equal and self.isolate:
            parameter.data.copy_(expected)

    def _value(self, phase: StepPhase, action: Action, layer: int) -> None:
        value = self.runtime.pipeline.stages[action.stage].values[action.microbatch]
        for number, tensor in enumerate(tensors_of(value)):
            self._compare(phase, action, layer, RecordKey("output", layer, str(number)), tensor)

    def _gradient(self, phase: StepPhase, action: Action, source: int, layer: int | None = None) -> None:
        """Compare the gradient of the output of layer `source`, which is the input of `layer`."""
        recorded = self.recording.values[RecordScope(self.step, self._global(action))]
        location = source if layer is None else layer
        for number, tensor in enumerate(
            self.runtime.pipeline.stages[action.stage].gradients[action.microbatch]
        ):
            key = RecordKey("gradient", source, str(number))
            if tensor is None and key in recorded:
                # No gradient flows where the reference has one.
                tensor = torch.zeros_like(self._of_this_rank(recorded[key], recorded[key], key)[0])
            if tensor is not None:
                self._compare(phase, action, location, key, tensor)

    def _backward(self, action: Action, number: int) -> None:
        layer = self._layer(action.stage) + number
        use = layer, self._global(action)
        if action.kind in (Kind.I, Kind.B):
            self._gradient(StepPhase.INPUT_GRADIENT, action, layer - 1, layer)
            for which in self.uses[action.stage, number]:
                found = self._contribution(which[0], use)
                if found is not None:
                    late = action.kind is Kind.B or self.adds_late
                    tracked = self.tracker.after_input(which, use, *found, until_weight=late)
                    if tracked is not None:
                        self._weight_gradient(which, use, tracked)
        if action.kind in (Kind.W, Kind.B):
            for which in self.uses[action.stage, number]:
                tracked = self.tracker.after_weight(which, use)
                if tracked is not None:
                    self._weight_gradient(which, use, tracked)

    def _left(self, sums: Iterable[GradientKey]) -> None:
        """Of these, the weight gradients that never were certain."""
        for which, use, tracked in list(self.tracker.open_gradients(sums)):
            self._weight_gradient(which, use, tracked)

    def _weight_gradient(self, which: GradientKey, use: ParameterUse, tracked: TrackedGradient) -> None:
        name, _ = which
        location = Location(self.step, StepPhase.WEIGHT_GRADIENT, *use, name)
        origin = origin_of(self.runtime.blueprint.whole_layouts[name], self.runtime.mesh.coordinate)
        own = self._contribution(name, use)

        def alternatives() -> Named:
            if own is not None:
                yield "it was not added at all", tracked.expected - own[0]
                yield "it was added twice", tracked.expected + own[0]
                for other in range(self.recording.microbatches(self.step)):
                    found = self._contribution(name, (use[0], other))
                    if other != use[1] and found is not None:
                        text = f"what was added is that of micro-batch {other}"
                        yield text, tracked.expected - own[0] + found[0]
            before = self.recording.values.get(RecordScope(self.step - 1, WHOLE_STEP), {}).get(
                RecordKey("clipped", name=name)
            )
            if before is not None:
                text = "the gradient of the step before is still in it"
                yield text, tracked.expected + self.piece(name, before)

        expected, rounding = tracked.expected, None
        if self.dtypes is not None:
            expected = expected.to(self.dtypes[name][1])
            rounding = epsilon_of(expected.dtype)
        equal = self.findings.compare(
            location,
            tracked.actual,
            expected,
            tracked.tolerance,
            origin=origin,
            alternatives=alternatives,
            base=None if own is None else tracked.expected - own[0],
            rounding=rounding,
        )
        if not equal and not self.isolate:
            self.tracker.accept(which)
        elif not equal:
            tracked.actual.copy_(expected)
        elif self.dtypes is not None and not self.tracker.is_partial(which):
            tracked.actual.copy_(expected)
            self.tracker.accept(which, exactly=True)

    def left_of(self, name: str) -> float:
        """By how much this rank's own gradient of a parameter may still be missed, at the end of a step."""
        if self._is_local(name):
            return self.tracker.allowed(name)
        return sum(
            self.recording.tolerances[scope][key].allowed
            for scope, values in self.recording.values.items()
            for key in values
            if scope.step == self.step and key.kind == "contribution" and key.name == name
        )

    def _contribution(self, name: str, use: ParameterUse) -> tuple[Tensor, Tolerance] | None:
        """This rank's piece of what a use adds, from the recording."""
        layer, microbatch = use
        scope, key = RecordScope(self.step, microbatch), RecordKey("contribution", layer, name)
        whole = self.recording.values.get(scope, {}).get(key)
        if whole is None:
            return None
        return self.piece(name, whole), self.recording.tolerances[scope][key]

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor that is laid out as the parameter is."""
        return shard(whole, self.runtime.blueprint.whole_layouts[name], self.runtime.mesh.coordinate)

    def _is_local(self, name: str) -> bool:
        """Whether the gradient that a layer adds is right by itself, before a sum with other ranks of tp."""
        return self.runtime.blueprint.summed[name] == 1

    def _compare(
        self, phase: StepPhase, action: Action, layer: int | None, key: RecordKey, actual: Tensor
    ) -> None:
        number = self._global(action)
        scope = RecordScope(self.step, number)
        whole = self.recording.values[scope].get(key)
        expected, start = self._of_this_rank(whole, actual, key)
        origin = Origin(start)

        def alternatives() -> Named:
            for other in range(self.recording.microbatches(self.step)):
                value = self.recording.values.get(RecordScope(self.step, other), {}).get(key)
                if other != number and value is not None and whole is not None and value.shape == whole.shape:
                    yield f"it is that of micro-batch {other}", self._of_this_rank(value, actual, key)[0]
            before = self.recording.values.get(RecordScope(self.step - 1, number), {}).get(key)
            if before is not None and whole is not None and before.shape == whole.shape:
                yield "it is that of the step before", self._of_this_rank(before, actual, key)[0]
            if phase is StepPhase.FORWARD and whole is not None and self._cut_dim(key) is None:
                tp = self.runtime.mesh.size("tp")
                yield from with_other_parameters(expected, self._parameters_of(key.layer, scope), tp)
            if phase is StepPhase.LOSS and whole is not None:
                yield from self._other_losses(action.microbatch, scope, whole)

        behind = {StepPhase.FORWARD: -1, StepPhase.INPUT_GRADIENT: 1}.get(phase)
        through = None if behind is None else key._replace(layer=key.layer + behind)
        base = None if through is None else self.recording.values[scope].get(through)
        if base is not None and whole is not None and base.shape == whole.shape:
            base, _ = self._of_this_rank(base, actual, key)
        equal = self.findings.compare(
            Location(self.step, phase, layer, number, tensor=int(key.name or 0)),
            actual,
            expected,
            self.recording.tolerances[scope].get(key, NO_TOLERANCE),
            origin=origin,
            alternatives=alternatives,
            base=base,
            inside=lambda: self._inside(action, key.layer, scope) if phase is StepPhase.FORWARD else None,
        )
        if not equal and self.isolate and not _overlaps(actual):
            actual.data.copy_(expected)  # through .data: a layer may have saved what it gave

    def _parameters_of(self, layer: int, scope: RecordScope) -> dict[str, Tensor]:
        """The parameters of a layer in this step, whole, by name, as far as this rank has them recorded."""
        values = self.recording.values.get(RecordScope(self.step - 1, WHOLE_STEP), {})
        names = [k.name for k in self.recording.values[scope] if k[:2] == ("contribution", layer)]
        keys = {name: RecordKey("value", name=name) for name in names}
        return {name: values[key] for name, key in keys.items() if key in values}

    def _other_losses(self, microbatch: int, scope: RecordScope, total: Tensor) -> Named:
        """The loss that other targets would have; nothing where the output is more than one tensor."""
        last = sum(self.runtime.blueprint.layers_per_stage) - 1
        output = self.recording.values[scope].get(RecordKey("output", last, "0"))
        if output is not None and RecordKey("output", last, "1") not in self.recording.values[scope]:
            yield from with_another_loss(self.runtime.loss, output, self.targets, microbatch, total)

    def _inside(self, action: Action, layer: int, scope: RecordScope) -> InnerDifference | None:
        """Which module inside of a layer is the first whose numbers differ: see `first_inner_difference`."""
        sketches = self.sketches.get((action.stage, layer - self._layer(action.stage)))
        if sketches is None:
            return None
        keys = [key for key in self.recording.values[scope] if key[:2] == ("inside", layer)]
        expected = {key.name: self.recording.values[scope][key] for key in keys}
        tolerances = {key.name: self.recording.tolerances[scope][key] for key in keys}
        return first_inner_difference(sketches.found, expected, tolerances)

    def _forget_sketches(self) -> None:
        for sketches in self.sketches.values():
            sketches.begin()

    def _of_this_rank(
        self, whole: Tensor | None, actual: Tensor, key: RecordKey
    ) -> tuple[Tensor, tuple[int, ...]]:
        """What stands in the place of `actual`, and where that begins in the whole tensor.

        Nothing recorded means zeros; logits may be cut by class, what flows by sequence.
        """
        nowhere = (0,) * actual.dim()
        if whole is None:
            return torch.zeros_like(actual), nowhere
        dim = self._cut_dim(key)
        if dim is None:
            return whole, nowhere
        # Not the engine's own range: that may be what is wrong.
        mesh = self.runtime.mesh
        own = divide(whole.shape[dim], mesh.size("tp"))[mesh.index("tp")]
        begin = [0] * whole.dim()
        begin[dim] = own.start
        return whole.narrow(dim, own.start, len(own)), tuple(begin)

    def _cut_dim(self, key: RecordKey) -> int | None:
        """Along which dim the ranks of `tp` have pieces of a recorded tensor."""
        if key.kind == "total":
            return None
        if (
            self.runtime.vocabulary is not None
            and key.layer == sum(self.runtime.blueprint.layers_per_stage) - 1
        ):
            return -1
        if key.layer < 0 or key.name != "0":
            return None
        return self.runtime.blueprint.sequence_dims[key.layer].next

    def _layer(self, stage: int) -> int:
        """The number of the first layer of a stage in the model."""
        return sum(self.runtime.blueprint.layers_per_stage[:stage])

    def _global(self, action: Action) -> int:
        """The number of a micro-batch in the global batch."""
        return self.runtime.mesh.index("dp") * self.runtime.blueprint.plan.microbatches + action.microbatch


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as after `expand`: no value can be written there."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
