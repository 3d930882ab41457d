"""Comparison of the result of each instruction of a step with the recording.

Each tensor is compared right after it was computed, before its memory can be written again.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch
from torch import Tensor

from plait.engine.runner import Runtime
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.program import (
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
from plait.tensor.nested_values import Value, tensors_of, with_tensors
from plait.verification.candidate.float8_scale_checker import ScaleChecker
from plait.verification.candidate.local_activations import ActivationParts
from plait.verification.candidate.routing_checker import RoutingChecker
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.candidate.weight_gradient_checker import WeightGradientChecker, sum_over
from plait.verification.reference.differences_within_layers import (
    ComparedModules,
    InnerDifference,
    ModuleSketches,
    RMSNorms,
    first_inner_difference,
    input_is_equal,
    overlaps,
    rounded_otherwise,
)
from plait.verification.reference.recording import NO_TOLERANCE
from plait.verification.reference.router_losses import OF_ROUTERS
from plait.verification.reference.values_after_mistakes import (
    MISTAKEN,
    NamedTensors,
    fitting_mistakes,
    with_another_loss,
    with_local_positions,
    with_other_parameters,
    with_other_router_losses,
)
from plait.verification.step_location import Location, RecordKey, RecordScope, StepPhase

OF_A_LAYER = (StepPhase.FORWARD, StepPhase.INPUT_GRADIENT, StepPhase.WEIGHT_GRADIENT)
"""Phases in which what a layer has computed is compared."""


class InstructionChecker:
    """Compares the result of each instruction of one rank with the recording of the reference run."""

    def __init__(self, runtime: Runtime, comparison: StepComparison) -> None:
        self.runtime, self.blueprint = runtime, runtime.blueprint
        self.comparison = comparison
        self.recording = comparison.recording
        self.isolate = comparison.options.isolate
        self.step, self.evaluating = -1, False
        self.parts = ActivationParts(runtime)
        self.targets: list[Value] = []
        """Expected targets, of whole sequences, of each of this rank's micro-batches."""
        self.earlier_targets: dict[str, list[Value]] = {}
        """Those of the first step and of the step before, by their names in a sentence."""
        compute = comparison.formats.compute
        self.computes_in_16_bits = compute is not None and compute.itemsize <= 2
        self.computes_logits = self.blueprint.output_linear is not None
        """Whether the loss computes logits: then the last layer gives features, and no loss before `I`."""
        self.outputs: dict[int, Value] = {}
        """By micro-batch, whose loss is not compared yet: what the reference gave its loss."""
        self.sketches: dict[tuple[int, int], ModuleSketches] = {}
        """By stage and layer."""
        self.rms_norms: dict[tuple[int, int], RMSNorms] = {}
        """Likewise; in 16 bits only."""
        self.weights = WeightGradientChecker(runtime, comparison)
        self.routing = RoutingChecker(runtime, comparison, self.parts)
        self.scales = ScaleChecker(runtime, comparison, self.parts)

    def begin_step(self, step: int, targets: list[Value], *, evaluating: bool = False) -> None:
        """Prepare to check the instructions of a step, or of the evaluation before it.

        `targets`: per micro-batch of this rank, its targets, of whole sequences.
        """
        self.evaluating = evaluating
        if self.targets:
            self.earlier_targets["the targets of the step before"] = self.targets
            self.earlier_targets.setdefault("the targets of the first step", self.targets)
        self.step, self.targets = step, targets
        self.outputs.clear()
        self.weights.begin_step(step)
        layers = {
            (stage.number, number): layer.module
            for stage in self.runtime.pipeline.stages.values()
            for number, layer in enumerate(stage.layers)
        }
        if self.comparison.options.mode != "exact":
            self.sketches = {key: ModuleSketches(module) for key, module in layers.items()}
        self.routing.begin_step(step, evaluating=evaluating)
        self.scales.begin_step()
        if self.computes_in_16_bits:
            self.rms_norms = {key: RMSNorms(module) for key, module in layers.items()}

    def check(self, instruction: Instruction) -> None:
        """Compare the result of an instruction that has just run with the reference run's."""
        match instruction:
            case TakeBatch(action):
                self._compare_value(StepPhase.INPUT, action, -1)
            case AwaitReceive(action) | LocalTransfer(action) if action.kind is Kind.F:
                source = self.blueprint.stage_layers[action.stage - 1][-1]
                self._compare_value(StepPhase.MESSAGE, action, source)
            case AwaitReceive(action) | LocalTransfer(action):
                source = self.blueprint.stage_layers[action.stage][-1]
                self._compare_gradient(StepPhase.GRADIENT_MESSAGE, action, source, source)
            case AwaitParameters(unit):
                self._compare_parameters(unit)
            case RunLayer(action, layer):
                self._compare_layer(action, layer)
                for sketches in self.sketches.values():
                    sketches.begin()  # also drops those of a recomputed forward
                for norms in self.rms_norms.values():
                    norms.begin()
            case ComputeLoss(action):
                if self.evaluating or not self.computes_logits:
                    self._compare_loss(action)
            case SeedGradient(action):
                if self.computes_logits:
                    self._compare_loss(action)
                last = self.blueprint.stage_layers[-1][-1]
                self._compare_gradient(StepPhase.LOSS_GRADIENT, action, last, last)
            case ScatterGradient(unit):
                self.weights.before_scatter(self.runtime.units[unit].parameters)
            case Finish():
                self.weights.compare_open()
                self.routing.end_step()
                self.scales.end_step()
                while self.sketches:
                    self.sketches.popitem()[1].close()
                while self.rms_norms:
                    self.rms_norms.popitem()[1].close()

    def _compare_parameters(self, unit: str) -> None:
        """Compare a sharding unit's gathered parameters with the reference run's after the previous step."""
        users = self.blueprint.lowering_spec.units[unit]
        layer = min(self.blueprint.stage_layers[user.stage][user.layer] for user in users)
        held = self.runtime.units[unit]
        scales = held.scales_of(held.stages[0])
        for name, parameter in held.parameters.items():
            self._compare_parameter(name, parameter, layer, scales.get(id(parameter)))

    def _compare_parameter(
        self, name: str, parameter: Tensor, layer: int, scale: Tensor | None = None
    ) -> None:
        """Compare a gathered parameter; `scale`: that of one in float8, which is compared in float64."""
        scope, key = RecordScope(self.step - 1), RecordKey("value", name=name)
        box, tolerance = self.weights.box(name), self.recording.tolerances[scope][key]
        if self.comparison.resynchronizes:  # the optimizer's parameters were reset to the reference's
            tolerance = NO_TOLERANCE

        def used(recorded: Tensor) -> Tensor:
            """Return this rank's part of a recorded parameter, as layers use it."""
            if self.comparison.resynchronizes:
                dtype = self.comparison.formats.compute_of(self.comparison.sequence.parameters[name])
                recorded = recorded.to(dtype)
            return box.of(recorded if scale is None else self.scales.weight_in_float8(recorded))

        def mistakes() -> NamedTensors:
            before = self.recording.find(RecordScope(self.step - 2), key)
            if before is not None:
                text = "what differs is as it was before the last step of the optimizer"
                is_right = (actual - expected).abs() <= tolerance.allowed
                yield text, torch.where(is_right, expected, used(before))

        actual, expected = parameter.detach(), used(self.recording.values[scope][key])
        if scale is not None:
            actual = actual.double() * scale.double()
        findings = self.comparison.findings
        location = Location(self.step, StepPhase.PARAMETERS, layer, name=name, evaluating=self.evaluating)
        equal = findings.compare(location, actual, expected, tolerance, box=box, alternatives=mistakes())
        if not equal and self.isolate:
            parameter.data.copy_(expected if scale is None else expected / scale)

    def _compare_layer(self, action: Action, number: int) -> None:
        layer = self.blueprint.stage_layers[action.stage][number]
        module = self.runtime.pipeline.stages[action.stage].layers[number].module
        scope = self._scope(action)
        self.routing.compare(action, layer, module, scope)
        if action.kind is Kind.F:
            self._compare_value(StepPhase.FORWARD, action, layer)
            if self.computes_in_16_bits:
                self._compare_norms(action, number, layer)
        elif action.kind is not Kind.W:
            self._compare_gradient(StepPhase.INPUT_GRADIENT, action, layer - 1, layer)
        if action.kind is not Kind.F:
            inside = partial(self._inner_difference, StepPhase.WEIGHT_GRADIENT, layer, scope)
            use = layer, scope.microbatch
            self.weights.after_backward(action.kind, action.stage, number, use, inside)
        self.scales.compare(layer, scope, is_forward=action.kind is Kind.F)

    def _compare_value(self, phase: StepPhase, action: Action, layer: int) -> None:
        """Compare the output of `layer` for the action's micro-batch with that of the reference run."""
        value = self.runtime.pipeline.stages[action.stage].values[action.microbatch]
        keys = []
        for number, tensor in enumerate(tensors_of(value)):
            keys.append(RecordKey("output", layer, str(number)))
            self._compare(phase, action, layer, keys[-1], tensor)
        if phase is StepPhase.FORWARD and layer == self.blueprint.stage_layers[-1][-1]:
            scope = self._scope(action)
            given_to_loss = [RecordKey("logits", layer)] if self.computes_logits else keys
            recorded = [self.recording.find(scope, key) for key in given_to_loss]
            if all(one is not None for one in recorded):
                self.outputs[action.microbatch] = with_tensors(value, recorded)

    def _compare_norms(self, action: Action, number: int, layer: int) -> None:
        """Compare how precisely the norms of a layer have computed."""
        scope, findings = self._scope(action), self.comparison.findings
        location = Location(self.step, StepPhase.FORWARD, layer, scope.microbatch, evaluating=self.evaluating)
        found = list(self.rms_norms[action.stage, number].differences())
        sketches = self.sketches[action.stage, number]
        recorded = self.recording.values[scope].items()
        expected = {key.name: value for key, value in recorded if key[:2] == ("inside", layer)}
        other = rounded_otherwise(sketches.found, expected, sketches.norms)
        for sentence, actual, right in (*found, *([other] if other is not None else [])):
            findings.compare(location, actual, right, NO_TOLERANCE, alternatives=[(sentence, actual)])

    def _compare_loss(self, action: Action) -> None:
        """Compare a micro-batch's summed loss, under context parallelism this rank's summand of it."""
        scope, key = self._scope(action), RecordKey("total")
        expected, tolerance = self.recording.values[scope][key], self.recording.tolerances[scope][key]
        number, loss = action.microbatch, self.runtime.loss
        actual, output = self.runtime.pipeline.loss_stage.total(number), self.outputs.pop(number, None)
        if output is not None:
            expected, tolerance = self.parts.total(loss, output, self.targets[number], expected, tolerance)
        location = Location(self.step, StepPhase.LOSS, None, scope.microbatch, evaluating=self.evaluating)
        others = self._alternatives(StepPhase.LOSS, scope, key, actual)
        mistakes = chain(others, self._other_losses(number, scope, expected))
        findings = self.comparison.findings
        equal = findings.compare(location, actual, expected, tolerance, alternatives=mistakes)
        if not equal and self.isolate:
            actual.data.copy_(expected)

    def _compare_gradient(self, phase: StepPhase, action: Action, source: int, layer: int) -> None:
        """Compare the gradient of layer `source`'s output with the reference run's; report it at `layer`."""
        scope = self._scope(action)
        gradients = self.runtime.pipeline.stages[action.stage].gradients[action.microbatch]
        for number, tensor in enumerate(gradients):
            key = RecordKey("gradient", source, str(number))
            recorded = self.recording.find(scope, key)
            if tensor is None and recorded is not None:
                tensor = torch.zeros_like(self._part(recorded, key))
            if tensor is None:
                continue
            whole = tensor
            if phase is StepPhase.LOSS_GRADIENT and self.computes_logits and self.runtime.vocabulary:
                whole = sum_over(self.runtime.mesh.group("tp"), tensor)  # each rank has a part of the sum
            equal = self._compare(phase, action, layer, key, whole)
            if whole is not tensor and not equal and self.isolate:
                tensor.copy_(whole if self.runtime.mesh.index("tp") == 0 else torch.zeros_like(whole))

    def _compare(
        self, phase: StepPhase, action: Action, layer: int | None, key: RecordKey, actual: Tensor
    ) -> bool:
        """Compare a tensor with the one recorded under `key`; return whether they are equal."""
        scope, number = self._scope(action), int(key.name)
        recorded = self.recording.find(scope, key)
        box = None if recorded is None else self.parts.box(key, recorded.shape)
        expected = torch.zeros_like(actual) if recorded is None else self._part(recorded, key)
        before = {StepPhase.FORWARD: key.layer - 1, StepPhase.INPUT_GRADIENT: key.layer + 1}.get(phase)
        base = None if before is None else self.recording.find(scope, key._replace(layer=before))
        if base is not None and recorded is not None and base.shape == recorded.shape:
            base = self._part(base, key)
        equal = self.comparison.findings.compare(
            Location(self.step, phase, layer, scope.microbatch, tensor=number, evaluating=self.evaluating),
            actual,
            expected,
            self.recording.tolerances[scope].get(key, NO_TOLERANCE),
            box=box,
            alternatives=self._alternatives(phase, scope, key, actual),
            base=base,
            inside=lambda: self._inner_difference(phase, layer, scope),
        )
        if (self.recording.narrowing if equal else self.isolate) and not overlaps(actual):
            actual.data.copy_(expected)  # through .data: a layer may have saved its output
        return equal

    def _alternatives(
        self, phase: StepPhase, scope: RecordScope, key: RecordKey, actual: Tensor
    ) -> NamedTensors:
        """Yield the values that a tensor would have after common mistakes; none if it is not recorded."""
        recorded = self.recording.find(scope, key)
        if recorded is None:
            return
        for other in range(self.recording.microbatches(self.step)):
            value = self.recording.find(scope._replace(microbatch=other), key)
            if other != scope.microbatch and value is not None and value.shape == recorded.shape:
                yield f"it is that of micro-batch {other}", self._part(value, key)
        before = self.recording.find(RecordScope(self.step - 1, scope.microbatch), key)
        if before is not None and before.shape == recorded.shape:
            yield "it is that of the step before", self._part(before, key)
        own = self.recording.find(scope, key._replace(kind=OF_ROUTERS))
        if phase is StepPhase.INPUT_GRADIENT and own is not None:
            yield from with_other_router_losses(self._part(recorded, key), self._part(own, key), actual)
        if phase is StepPhase.FORWARD:
            sums = [
                (one.name, self._part(value, key))
                for one, value in self.recording.values[scope].items()
                if one[:2] == (MISTAKEN, key.layer) and key.name == "0"
            ]
            yield from fitting_mistakes(actual, self.recording.tolerances[scope][key].allowed, sums)
            if self.parts.tp_dim(key) is None:
                yield from self._with_other_parameters(scope, key, recorded)

    def _with_other_parameters(self, scope: RecordScope, key: RecordKey, recorded: Tensor) -> NamedTensors:
        """Yield a layer's output after common mistakes with its biases and tables of positions."""
        values = self.recording.values.get(RecordScope(self.step - 1), {})
        names = [k.name for k in self.recording.values[scope] if k[:2] == ("contribution", key.layer)]
        keys = {name: RecordKey("value", name=name) for name in names}
        whole = {name: values[key] for name, key in keys.items() if key in values}
        for text, value in with_other_parameters(recorded, whole, self.runtime.mesh.size("tp")):
            yield text, self._part(value, key)
        positions = self.parts.positions(recorded.shape[1]) if recorded.dim() > 2 else None
        if positions is not None:
            yield from with_local_positions(self._part(recorded, key), whole, positions)

    def _other_losses(self, microbatch: int, scope: RecordScope, total: Tensor) -> NamedTensors:
        """Yield a micro-batch's loss after common mistakes; nothing for an output of several tensors."""
        last = self.blueprint.stage_layers[-1][-1]
        key = RecordKey("logits", last) if self.computes_logits else RecordKey("output", last, "0")
        output = self.recording.find(scope, key)
        if output is not None and self.recording.find(scope, RecordKey("output", last, "1")) is None:
            output, *targets = self.parts.of_cp([output, *self.targets])
            others = self.parts.targets_shifted_late(self.targets[microbatch])
            others += [
                (text, self.parts.of_cp(every[microbatch])) for text, every in self.earlier_targets.items()
            ]
            yield from with_another_loss(self.runtime.loss, output, targets, microbatch, total, others)

    def _inner_difference(
        self, phase: StepPhase, layer: int | None, scope: RecordScope
    ) -> InnerDifference | None:
        """Return the first difference inside the layer that has just run, if one has and it is known."""
        if layer is None or phase not in OF_A_LAYER:
            return None
        is_forward, is_given = phase is StepPhase.FORWARD, partial(self._is_given, scope, layer)
        cast = self.scales.mistake(layer, scope, is_given, is_forward=is_forward)
        if cast is not None:
            return InnerDifference(-1, f"inside, {cast}")
        compared = self._compared_modules(layer, scope)
        return (
            None if compared is None or phase is not StepPhase.FORWARD else first_inner_difference(*compared)
        )

    def _compared_modules(self, layer: int, scope: RecordScope) -> ComparedModules | None:
        """Return the sketches of the modules of one of this rank's layers, with the recorded ones, if any."""
        layers = self.blueprint.stage_layers
        stage = next(number for number, own in enumerate(layers) if layer in own)
        sketches = self.sketches.get((stage, layer - layers[stage].start))
        if sketches is None:
            return None
        keys = [key for key in self.recording.values[scope] if key[:2] == ("inside", layer)]
        expected = {key.name: self.recording.values[scope][key] for key in keys}
        tolerances = {key.name: self.recording.tolerances[scope][key] for key in keys}
        return sketches.found, expected, tolerances

    def _is_given(self, scope: RecordScope, layer: int, path: str) -> bool:
        """Return whether a module of `layer`, by its path in the model, got the expected input.

        True where no module is compared, as in mode exact.
        """
        compared = self._compared_modules(layer, scope)
        name = path.removeprefix(f"{self.blueprint.sequence.layers[layer].path}.")
        return compared is None or input_is_equal(name, *compared)

    def _part(self, recorded: Tensor, key: RecordKey) -> Tensor:
        """Return this rank's part of a recorded output or gradient."""
        box = self.parts.box(key, recorded.shape)
        return recorded if box is None else box.of(recorded)

    def _scope(self, action: Action) -> RecordScope:
        """Return the scope of a micro-batch, by its index in the global batch."""
        first = self.runtime.mesh.index("dp") * self.blueprint.plan.microbatches
        return RecordScope(self.step, first + action.microbatch, self.evaluating)
