"""Comparison of the parameters, gradients, optimizer state and losses of a step with the recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.engine.engine import Engine
from plait.models.layers.layer_sequence import LayerSequence
from plait.optimizers.owned_optimizer import Owned
from plait.verification.expected_dtypes import NumberFormats, epsilon_of
from plait.verification.findings import ComparedBox, Findings, box_of, has_only_small_digits_of_float16
from plait.verification.options import VerifyOptions
from plait.verification.reference.recording import NO_TOLERANCE, ReferenceRecording
from plait.verification.step_location import Location, RecordKey, RecordScope, StepPhase

DIVIDED_IN_FLOAT16 = (
    "small elements have only the digits that float16 has for them: it was divided by the loss scale in "
    "float16, and not where it has more digits"
)
LOSS_SCALE = "loss scale"
"""Name of the loss scale in a location, in place of a parameter's."""


class StepComparison:
    """Compares this rank's shards of parameters, gradients and optimizer state with the recorded tensors.

    A tensor is overwritten by the reference's: with `isolate` if it differs, with `resynchronizes` if it is a
    parameter's and equal.
    """

    def __init__(
        self,
        engine: Engine,
        options: VerifyOptions,
        recording: ReferenceRecording,
        sequence: LayerSequence,
        formats: NumberFormats,
        findings: Findings | None = None,
    ) -> None:
        """`findings`: those to which further ones are added; None: new ones."""
        self.engine = engine
        self.options = options
        self.recording = recording
        self.sequence = sequence
        self.formats = formats
        self.findings = Findings(len(sequence.layers)) if findings is None else findings
        self.parameters = dict(engine.named_parameters())
        dtypes = {formats.gradient_of(sequence.parameters[name]) for name in self.parameters}
        is_exact = options.mode == "exact"
        self.gradient_epsilon = 0.0 if is_exact else max(map(epsilon_of, dtypes), default=0.0)
        """Machine epsilon of the dtypes in which gradients are accumulated; 0 in mode exact."""
        self.resynchronizes = options.resynchronizes or recording.narrowing
        """Whether gradients and parameters continue with the reference's values after they were compared."""
        self.is_dynamic = formats.scales_dynamically(sequence.parameters.values())
        """Whether the loss scale is dynamic."""

    def of_engine(self, engine: Engine) -> StepComparison:
        """Return a comparison of another engine of the same model, whose findings go to the same list."""
        given = self.options, self.recording, self.sequence, self.formats, self.findings
        return StepComparison(engine, *given)

    def compare(
        self,
        step: int,
        phase: StepPhase,
        key: RecordKey,
        actual: Tensor,
        parameter: str = "",
        alternatives: Sequence[tuple[str, Tensor]] = (),
        base: Tensor | None = None,
        inherited: float = 0.0,
        recorded_in: RecordScope | None = None,
    ) -> bool:
        """Compare a tensor (or shard) with the recorded one, which may overwrite it; return whether equal.

        `inherited`: the tolerance of the tensors from which it was computed, added to its own. `recorded_in`:
        the scope in the recording, by default the whole `step`.
        """
        scope = recorded_in or RecordScope(step)
        expected, box = self.expected(self.recording.values[scope][key], parameter, actual)
        tolerance, rounding = self.recording.tolerances[scope][key], None
        resynchronizes = self.resynchronizes and parameter != ""
        if resynchronizes:
            of_model = self.sequence.parameters[parameter]
            is_reduction = phase is StepPhase.REDUCTION
            master = epsilon_of(self.formats.master_of(of_model))
            rounding = self.formats.epsilon_of_gradient(of_model) if is_reduction else master
        tolerance = tolerance._replace(allowed=tolerance.allowed + inherited)
        if phase is StepPhase.REDUCTION and self._was_divided_in_float16(step, parameter, actual, expected):
            tolerance, alternatives = tolerance._replace(allowed=0.0), [(DIVIDED_IN_FLOAT16, actual)]
        equal = self.findings.compare(
            Location(step, phase, name=key.name, evaluating=scope.evaluated),
            actual,
            expected,
            tolerance,
            box=box,
            alternatives=alternatives,
            rounding=rounding,
            base=base,
        )
        if resynchronizes if equal else self.options.isolate:
            actual.data.copy_(expected)
        return equal

    def _was_divided_in_float16(self, step: int, name: str, actual: Tensor, expected: Tensor) -> bool:
        """Return whether a gradient times the loss scale was divided by it where small ones are lost."""
        may_overflow = self.formats.may_overflow(self.sequence.parameters[name])
        is_scaled = may_overflow and self.recording.number(step, "scale") != 1
        return is_scaled and has_only_small_digits_of_float16(actual, expected)

    def compare_unchanged(self, location: Location, actual: Tensor, before: Tensor, mistake: str) -> None:
        """Compare a parameter's tensor, or its state's, with that before a call that must not change it."""
        box, alternatives = None if "/" in location.name else self.box(location.name), [(mistake, actual)]
        self.findings.compare(location, actual, before, NO_TOLERANCE, box=box, alternatives=alternatives)

    def compare_loss_scale(self, step: int, phase: StepPhase, expected: float) -> None:
        """Compare the engine's loss scale with `expected`, unless both are 1."""
        actual = self.engine.loss_scale
        if not actual == expected == 1:
            ours, theirs = (torch.tensor(scale, dtype=torch.float64) for scale in (actual, expected))
            self.findings.compare(Location(step, phase, name=LOSS_SCALE), ours, theirs, NO_TOLERANCE)

    def compare_gradients(
        self,
        step: int,
        phase: StepPhase,
        kind: str,
        *,
        mistakes: Sequence[tuple[str, float]] = (),
        inherited: Callable[[str], float] = lambda name: 0.0,
    ) -> None:
        """Compare this rank's gradients with the reference run's gradients of `kind`: `final` or `clipped`.

        `mistakes`: sentences, each with the factor of the gradients that the mistake would cause.
        """
        records = self.recording.values[RecordScope(step)]
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            final = self.box(name).of(records[RecordKey("final", name=name)])
            alternatives = [(text, final * factor) for text, factor in mistakes]
            before = self.recording.find(RecordScope(step - 1), RecordKey("clipped", name=name))
            if before is not None and phase is StepPhase.REDUCTION:
                wrong = final + self.box(name).of(before)
                alternatives.append(("the gradient of the step before is still in it", wrong))
            gradient, key = self.gradient(name), RecordKey(kind, name=name)
            self.compare(step, phase, key, gradient, name, alternatives, inherited=inherited(name))

    def compare_state(
        self, step: int, optimizer: torch.optim.Optimizer, before: Mapping[str, Tensor] | None = None
    ) -> None:
        """Compare parameters and optimizer state with the reference run's after `step`.

        `before`: the parameters before the update. None: both were loaded, and are those of the step before.
        """
        phase, scope = StepPhase.OPTIMIZER, RecordScope(step)
        missing = "the optimizer has no such state: the parameter was not updated"
        if before is None:
            phase, scope = StepPhase.LOAD, RecordScope(step - 1)
            missing = "the loaded optimizer has no such state"
        for name, parameter in self.parameters.items():
            key, old = RecordKey("value", name=name), None if before is None else before[name]
            alternatives = [] if old is None else [("it was not updated", old)]
            self.compare(step, phase, key, parameter, name, alternatives, old, recorded_in=scope)
        for key, recorded in self.recording.values[scope].items():
            name, _, entry = key.name.rpartition("/")
            if key.kind != "state" or name not in self.parameters:  # rank 0 has the whole recording
                continue
            shard, of_shard = self.parameters[name], name
            if isinstance(optimizer, Owned):  # the state of whole parameters, with their owners
                of_shard = ""
                if optimizer.state_rank(shard) != self.engine.mesh.rank:
                    continue
            state, alternatives = optimizer.state.get(shard, {}).get(entry), []
            if state is None:
                state = torch.zeros_like(self.expected(recorded, of_shard)[0])
                alternatives = [(missing, state)]
            self.compare(step, phase, key, state, of_shard, alternatives, recorded_in=scope)

    def gradient(self, name: str) -> Tensor:
        """Return this rank's gradient of a parameter; zeros if it has none."""
        parameter = self.parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def set_gradients(self, step: int, kind: str) -> None:
        """Overwrite this rank's gradients with the recorded gradients of `kind`."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                recorded = self.recording.values[RecordScope(step)][RecordKey(kind, name=name)]
                parameter.grad.copy_(self.box(name).of(recorded))

    def expected(
        self, recorded: Tensor, parameter: str, actual: Tensor | None = None
    ) -> tuple[Tensor, ComparedBox | None]:
        """Return this rank's shard of a recorded tensor, or all of it if it has not the parameter's shape.

        Of a parameter without dims a rank has all (0-d) or nothing (1-d); a step count has no dims anywhere.
        """
        has_dims = recorded.dim() or (actual is not None and actual.dim())
        if parameter and has_dims and tuple(recorded.shape) == self.engine.layouts[parameter].shape:
            box = self.box(parameter)
            return box.of(recorded), box
        return recorded, None

    def box(self, name: str) -> ComparedBox:
        """Return which part of a parameter is this rank's shard."""
        return box_of(self.engine.layouts[name], self.engine.mesh.coordinate)
