"""The woven run of one rank, compared with the recording step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine import Engine, Runtime
from plait.layers.layer_sequence import LayerSequence
from plait.layers.nested import Value, split
from plait.layers.precision import convert
from plait.layout import shard
from plait.models.initial import initial_value
from plait.schedules.program import Instruction
from plait.verification.findings import WHOLE_TENSOR, Findings, Origin, one_alternative, origin_of
from plait.verification.formats import GROWTH_INTERVAL, INITIAL_LOSS_SCALE, NumberFormats, epsilon_of
from plait.verification.instruction_checker import InstructionChecker
from plait.verification.location import WHOLE_STEP, Location, RecordKey, RecordScope, StepPhase
from plait.verification.options import VerifyOptions
from plait.verification.reference_recording import NO_TOLERANCE, ReferenceRecording
from plait.verification.reference_update import CLIP_EPSILON
from plait.verification.start_values import ValueChange

LOSS_SCALE = "loss scale"
"""In the place of a parameter's name."""


class CandidateRun:
    """The woven run of one rank, compared with the recording."""

    def __init__(
        self,
        engine: Engine,
        options: VerifyOptions,
        recording: ReferenceRecording,
        sequence: LayerSequence,
        formats: NumberFormats,
    ) -> None:
        self.engine = engine
        self.recording = recording
        self.sequence = sequence
        self.formats = formats
        self.isolate = options.isolate
        self.resynchronizes = options.resynchronizes
        self.norm_type = options.norm_type
        self.seed = options.seed
        self.findings = Findings(len(sequence.layers))
        self.parameters = dict(engine.named_parameters())
        self.optimizer = options.optimizer(engine.parameter_groups(options.weight_decay))
        self.observer: InstructionChecker | None = None
        self.norm_is_wrong = False
        self.epsilon = 0.0
        """Of the dtypes that gradients are added up in."""
        if options.mode != "exact":
            kinds = {formats.gradient_of(sequence.parameters[name]) for name in self.parameters}
            self.epsilon = max(map(epsilon_of, kinds), default=0.0)

    @property
    def is_dynamic(self) -> bool:
        """Whether the plan asks for a dynamic loss scale."""
        overflows = any(map(self.formats.may_overflow, self.sequence.parameters.values()))
        return self.formats.loss_scale is None and overflows

    def start(self, change: ValueChange) -> None:
        """Compare the initial values, and put what both sides start from in their place."""
        layouts, coordinate = self.engine.layouts, self.engine.mesh.coordinate
        for name, parameter in self.parameters.items():
            layer = self.sequence.layers[self.sequence.users[name][0]]
            whole = initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), self.seed)
            master = self.formats.master_of(self.sequence.parameters[name])
            expected = convert(shard(whole, layouts[name], coordinate), master, parameter.device)
            location = Location(0, StepPhase.INITIAL, name=name)
            self.findings.compare(
                location, parameter, expected, NO_TOLERANCE, origin=origin_of(layouts[name], coordinate)
            )
            with torch.no_grad():
                parameter.copy_(shard(change(name, whole), layouts[name], coordinate))
        first = INITIAL_LOSS_SCALE if self.is_dynamic else self.formats.loss_scale or 1.0
        self._compare_scale(0, StepPhase.INITIAL, first)
        if self.engine.adapts_loss_scale:
            settled = float(self.recording.values[RecordScope(0, WHOLE_STEP)][RecordKey("scale")])
            begun = {"value": settled, "good_steps": GROWTH_INTERVAL - 1}  # so that it grows after one step
            self.engine.run_state = self.engine.run_state | {"loss_scale": begun}

    def train(self, step: int, inputs: Value, targets: Value) -> None:
        """A step: forward and backward under observation, the norm, the optimizer."""
        recorded = self.recording.values[RecordScope(step, WHOLE_STEP)]
        if self.engine.mesh.rank == 0:
            self._compare(step, StepPhase.BATCH, RecordKey("whole"), recorded[RecordKey("mean")].clone())
        self._compare_scale(step, StepPhase.LOSS_GRADIENT, float(recorded[RecordKey("scale")]))
        self.optimizer.zero_grad()
        self.engine.observe(self._observe(step, self._share(targets)))
        mean = self.engine.forward_backward(self._share(inputs), self._share(targets))
        self.engine.observe(None)
        self._compare_gradients(step, StepPhase.REDUCTION, "final")
        self._compare(step, StepPhase.MEAN_LOSS, RecordKey("mean"), mean)
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._update(step, float(recorded[RecordKey("clip")]))
        self._compare_updates(step, before)

    def evaluate(self, step: int, inputs: Value, targets: Value) -> None:
        """The loss without training."""
        mean = self.engine.evaluate(self._share(inputs), self._share(targets))
        self._compare(step, StepPhase.EVALUATION, RecordKey("evaluation"), mean)

    def overflow(self, step: int) -> None:
        """With a loss scale: gradients that are not finite on one stage change nothing on any rank.

        Compares, as of a step after the last one, the parameters and the optimizer's state with what they
        were, and the loss scale with half of that if it is dynamic.
        """
        scaled = self.is_dynamic or self.formats.loss_scale not in (None, 1.0)
        trained = [name for name, p in self.sequence.parameters.items() if p.requires_grad]
        if not scaled or not trained:
            return
        scale = self.engine.loss_scale
        before = {name: tensor.detach().clone() for name, tensor in self._updated()}
        told = "it was updated, though the gradients of the step were not finite"
        poisoned = self.parameters.get(trained[-1])
        if poisoned is not None:
            poisoned.grad = torch.full_like(poisoned, torch.inf)
        self.engine.step(self.optimizer, 1.0)
        for name, tensor in self._updated():
            origin = Origin() if "/" in name else self._origin(name)
            self.findings.compare(
                Location(step, StepPhase.OPTIMIZER, name=name),
                tensor,
                before[name],
                NO_TOLERANCE,
                origin=origin,
                alternatives=partial(one_alternative, told, tensor),
            )
        self._compare_scale(step, StepPhase.LOSS_GRADIENT, scale / 2 if self.is_dynamic else scale)

    def _update(self, step: int, bound: float) -> None:
        """Clip the gradients and let the optimizer step.

        Steps take turns: `Engine.step`, and `clip_grad_norm_` with `optimizer.step()`, without `Engine.step`.
        Before it they are called with a bound above the norm, which must change nothing; not under a dynamic
        loss scale, which counts how often gradients are looked at.
        """
        together = step % 2 == 0
        recorded = self.recording.values[RecordScope(step, WHOLE_STEP)]
        self.norm_is_wrong = False
        if not self.engine.adapts_loss_scale:
            loose = 3 * (float(recorded[RecordKey("norm")]) + CLIP_EPSILON)
            self._clip_nothing(step, lambda: self.engine.clip_grad_norm_(loose))
            if together:
                self._clip_nothing(step, lambda: self._step_idly(step, loose))
        if together:
            self._step_together(step, bound)
            return
        norm = self.engine.clip_grad_norm_(bound, self.norm_type)
        self._compare_norm(step, norm, self._kind_of_norm)
        self._compare_clipped(step)
        self.optimizer.step()

    def _clip_nothing(self, step: int, clip: Callable[[], Tensor]) -> None:
        """Compare what `clip` returns with the norm, and the gradients after it with what they were."""
        before = {
            name: self._gradient(name).clone() for name, p in self.parameters.items() if p.requires_grad
        }
        self._compare_norm(step, clip(), "norm")
        told = "it was scaled, though the norm is below the bound"
        for name, gradient in before.items():
            now = self._gradient(name)
            self.findings.compare(
                Location(step, StepPhase.CLIP, name=name),
                now,
                gradient,
                NO_TOLERANCE,
                origin=self._origin(name),
                alternatives=partial(one_alternative, told, now),
            )
            self.parameters[name].grad = now.copy_(gradient)

    def _step_idly(self, step: int, bound: float) -> Tensor:
        """`Engine.step` with an optimizer that has no parameter of the engine's."""
        idle = nn.Parameter(torch.zeros((), device=self.engine.mesh.device))
        idle.grad = torch.ones_like(idle)
        norm = self.engine.step(torch.optim.SGD([idle], lr=1.0), bound)
        location = Location(step, StepPhase.OPTIMIZER, name="an optimizer of one step")
        told = partial(one_alternative, "it was not updated", torch.zeros_like(idle))
        self.findings.compare(location, idle, torch.full_like(idle, -1.0), NO_TOLERANCE, alternatives=told)
        return norm

    def _step_together(self, step: int, bound: float) -> None:
        """`Engine.step`, with a look at the gradients that it gives to the optimizer."""
        looked = []

        def look(*_: Any) -> None:
            looked.append(True)
            self._compare_clipped(step)

        handle = self.optimizer.register_step_pre_hook(look)
        try:
            norm = self.engine.step(self.optimizer, bound, self.norm_type)
        finally:
            handle.remove()
        self._compare_norm(step, norm, self._kind_of_norm)
        if not looked:
            self._compare_clipped(step)

    @property
    def _kind_of_norm(self) -> str:
        """The recorded norm that gradients are clipped by."""
        return "norm" if self.norm_type == 2 else "largest"

    def _compare_norm(self, step: int, norm: Tensor, kind: str) -> None:
        """Compare what a call returned, unless one before it in this step was wrong already."""
        self.norm_is_wrong = self.norm_is_wrong or not self._compare(
            step, StepPhase.NORM, RecordKey(kind), norm
        )

    def _compare_clipped(self, step: int) -> None:
        """Compare the gradients that the optimizer is given."""
        if self.norm_is_wrong and self.isolate:  # they were scaled by the wrong norm
            self._put_gradients(step, "clipped")
            return
        recorded = self.recording.values[RecordScope(step, WHOLE_STEP)]
        norm = float(recorded[RecordKey(self._kind_of_norm)])
        factor = min(1.0, float(recorded[RecordKey("clip")]) / (norm + CLIP_EPSILON))
        mistakes = [("it was not scaled", 1.0), ("it was scaled twice", factor**2)] if factor < 1 else []
        self._compare_gradients(step, StepPhase.CLIP, "clipped", mistakes)

    def _gradient(self, name: str) -> Tensor:
        """This rank's gradient of a parameter; zeros where there is none."""
        parameter = self.parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _put_gradients(self, step: int, kind: str) -> None:
        recorded = self.recording.values[RecordScope(step, WHOLE_STEP)]
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad.copy_(self._piece(name, recorded[RecordKey(kind, name=name)]))

    def _compare_updates(self, step: int, before: dict[str, Tensor]) -> None:
        """Compare what the optimizer has made: the parameters, and its state of each."""
        recorded = self.recording.values[RecordScope(step, WHOLE_STEP)]
        states = [key for key in recorded if key.kind == "state"]
        for name, parameter in self.parameters.items():
            hints = [("it was not updated", before[name])]
            key = RecordKey("value", name=name)
            self._compare(step, StepPhase.OPTIMIZER, key, parameter, name, hints, before[name])
        for key in states:
            name, _, entry = key.name.rpartition("/")
            if name not in self.parameters:  # rank 0 has the whole recording
                continue
            state = self.optimizer.state.get(self.parameters[name], {}).get(entry)
            hints = []
            if state is None:
                state = torch.zeros_like(self._expected(recorded[key], name)[0])
                hints = [("the optimizer has no such state: the parameter was not updated", state)]
            self._compare(step, StepPhase.OPTIMIZER, key, state, name, hints)

    def _updated(self) -> Iterator[tuple[str, Tensor]]:
        """What an optimizer changes: parameters by name, and the tensors of its state of each."""
        for name, parameter in self.parameters.items():
            yield name, parameter
            for entry, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor):
                    yield f"{name}/{entry}", state

    def _observe(self, step: int, targets: Value) -> Callable[[Instruction, Runtime], None]:
        def observe(instruction: Instruction, runtime: Runtime) -> None:
            if self.observer is None:
                self.observer = InstructionChecker(
                    runtime,
                    self.recording,
                    self.findings,
                    epsilon=self.epsilon,
                    isolate=self.isolate,
                    dtypes=self._dtypes() if self.resynchronizes else None,
                )
            if self.observer.step != step:
                self.observer.begin(step, split(targets, runtime.blueprint.plan.microbatches, "targets"))
            self.observer(instruction, runtime)

        return observe

    def _dtypes(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Of each parameter as layers use it, and of the sum of its gradient."""
        parameters = self.sequence.parameters.items()
        return {name: (self.formats.compute_of(p), self.formats.gradient_of(p)) for name, p in parameters}

    def _compare_scale(self, step: int, phase: StepPhase, expected: float) -> None:
        """Compare the loss scale of the next step, unless there is none."""
        if self.engine.loss_scale == expected == 1:
            return
        actual, wanted = (
            torch.tensor(one, dtype=torch.float64) for one in (self.engine.loss_scale, expected)
        )
        self.findings.compare(Location(step, phase, name=LOSS_SCALE), actual, wanted, NO_TOLERANCE)

    def _compare_gradients(
        self, step: int, phase: StepPhase, kind: str, mistakes: Sequence[tuple[str, float]] = ()
    ) -> None:
        """`mistakes`: by what the final gradient may have been multiplied instead, after a sentence."""
        recorded = self.recording.values[RecordScope(step, WHOLE_STEP)]
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                final = self._piece(name, recorded[RecordKey("final", name=name)])
                hints = [(text, final * factor) for text, factor in mistakes]
                before = self.recording.values.get(RecordScope(step - 1, WHOLE_STEP), {}).get(
                    RecordKey("clipped", name=name)
                )
                if before is not None and phase is StepPhase.REDUCTION:
                    hints.append(
                        ("the gradient of the step before is still in it", final + self._piece(name, before))
                    )
                self._compare(step, phase, RecordKey(kind, name=name), self._gradient(name), name, hints)

    def _compare(
        self,
        step: int,
        phase: StepPhase,
        key: RecordKey,
        actual: Tensor,
        name: str = "",
        alternatives: Sequence[tuple[str, Tensor]] = (),
        base: Tensor | None = None,
    ) -> bool:
        """Compare a tensor of a step as a whole; a parameter's is this rank's piece of the recorded one."""
        scope = RecordScope(step, WHOLE_STEP)
        expected, origin = self._expected(self.recording.values[scope][key], name, actual)
        tolerance, rounding = self.recording.tolerances[scope][key], None
        if self.resynchronizes and name:
            of_model = self.sequence.parameters[name]
            rounding = epsilon_of(self.formats.master_of(of_model))
        if self.resynchronizes and phase is StepPhase.REDUCTION:
            rounding = self.formats.epsilon_of_gradient(of_model)
            tolerance = tolerance._replace(allowed=tolerance.allowed + self._inherited(name, step))
        equal = self.findings.compare(
            Location(step, phase, name=key.name),
            actual,
            expected,
            tolerance,
            origin=origin,
            alternatives=lambda: alternatives,
            rounding=rounding,
            base=base,
        )
        if (self.resynchronizes and name) if equal else self.isolate:
            actual.data.copy_(expected)
        return equal

    def _inherited(self, name: str, step: int) -> float:
        """By how much more a final gradient may be missed, as its contributions were."""
        assert self.observer is not None
        own, mesh = self.observer.left_of(name), self.engine.mesh
        return (
            own
            * mesh.size("dp")
            / float(self.recording.values[RecordScope(step, WHOLE_STEP)][RecordKey("scale")])
        )

    def _expected(self, recorded: Tensor, name: str, actual: Tensor | None = None) -> tuple[Tensor, Origin]:
        """This rank's piece of a parameter's tensor, and where it begins; all of any other.

        Of a parameter without dims a rank has all (0-d) or nothing (1-d); a count has no dims anywhere.
        """
        has_dims = recorded.dim() or (actual is not None and actual.dim())
        if name and has_dims and tuple(recorded.shape) == self.engine.layouts[name].shape:
            return self._piece(name, recorded), self._origin(name)
        return recorded, WHOLE_TENSOR

    def _origin(self, name: str) -> Origin:
        return origin_of(self.engine.layouts[name], self.engine.mesh.coordinate)

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        return shard(whole, self.engine.layouts[name], self.engine.mesh.coordinate)

    def _share(self, value: Value) -> Value:
        """This data-parallel rank's rows of a global batch."""
        mesh = self.engine.mesh
        return split(value, mesh.size("dp"), "batch")[mesh.index("dp")]
