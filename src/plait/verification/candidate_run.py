"""The parallel run on one rank, compared step by step with the recording of the reference run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.engine import Runtime
from plait.layers.nested import Value, split
from plait.layers.precision import convert
from plait.models.initial import initial_value
from plait.schedules.program import Instruction
from plait.verification.candidate_update import CandidateUpdate
from plait.verification.expected_dtypes import GROWTH_INTERVAL, INITIAL_LOSS_SCALE
from plait.verification.instruction_checker import InstructionChecker
from plait.verification.location import Location, RecordKey, RecordScope, StepPhase
from plait.verification.reference_recording import NO_TOLERANCE
from plait.verification.start_values import ValueChange
from plait.verification.step_comparison import StepComparison


class CandidateRun:
    """Trains with the engine as one rank, and compares every result through `comparison`."""

    def __init__(self, comparison: StepComparison) -> None:
        self.comparison = comparison
        self.engine = comparison.engine
        self.recording = comparison.recording
        self.update = CandidateUpdate(comparison)
        self.checker: InstructionChecker | None = None

    def start(self, change: ValueChange) -> None:
        """Compare the initial parameters and loss scale, then set parameters to the results of `change`."""
        sequence, formats = self.comparison.sequence, self.comparison.formats
        for name, parameter in self.comparison.parameters.items():
            layer = sequence.layers[sequence.users[name][0]]
            piece, local = self.comparison.piece(name), name.removeprefix(f"{layer.path}.")
            whole = initial_value(layer.module, layer.path, local, self.comparison.options.seed)
            master = formats.master_of(sequence.parameters[name])
            expected = convert(piece.of(whole), master, parameter.device)
            location = Location(0, StepPhase.INITIAL, name=name)
            self.comparison.findings.compare(location, parameter, expected, NO_TOLERANCE, piece=piece)
            with torch.no_grad():
                parameter.copy_(piece.of(change(name, whole)))
        first = INITIAL_LOSS_SCALE if self.comparison.is_dynamic else formats.loss_scale or 1.0
        self.comparison.compare_loss_scale(0, StepPhase.INITIAL, first)
        if self.engine.adapts_loss_scale:
            settled = self.recording.number(0, "scale")
            state = {"value": settled, "good_steps": GROWTH_INTERVAL - 1}  # so that it grows after one step
            self.engine.run_state = self.engine.run_state | {"loss_scale": state}

    def train(self, step: int, inputs: Value, targets: Value) -> None:
        """Run one training step and compare each instruction, the gradients, the norm and the update."""
        comparison = self.comparison
        if self.engine.mesh.rank == 0:
            mean = self.recording.values[RecordScope(step)][RecordKey("mean")].clone()
            comparison.compare(step, StepPhase.BATCH, RecordKey("whole"), mean)
        scale = self.recording.number(step, "scale")
        comparison.compare_loss_scale(step, StepPhase.LOSS_GRADIENT, scale)
        self.update.optimizer.zero_grad()
        self.engine.observe(self._observer(step, self._rows_of_rank(targets)))
        mean = self.engine.forward_backward(self._rows_of_rank(inputs), self._rows_of_rank(targets))
        self.engine.observe(None)

        def inherited(name: str) -> float:
            """Return the tolerance of a gradient that stems from the tolerances of its contributions."""
            if not self.comparison.options.resynchronizes:
                return 0.0
            assert self.checker is not None
            return self.checker.weights.tolerance_of(name) * self.engine.mesh.size("dp") / scale

        comparison.compare_gradients(step, StepPhase.REDUCTION, "final", inherited=inherited)
        comparison.compare(step, StepPhase.MEAN_LOSS, RecordKey("mean"), mean)
        self.update.run(step)

    def evaluate(self, step: int, inputs: Value, targets: Value) -> None:
        """Compare the evaluation loss of a batch with the recording."""
        mean = self.engine.evaluate(self._rows_of_rank(inputs), self._rows_of_rank(targets))
        self.comparison.compare(step, StepPhase.EVALUATION, RecordKey("evaluation"), mean)

    def _observer(self, step: int, targets: Value) -> Callable[[Instruction, Runtime], None]:
        def observe(instruction: Instruction, runtime: Runtime) -> None:
            if self.checker is None:
                self.checker = InstructionChecker(runtime, self.comparison)
            if self.checker.step != step:
                self.checker.begin_step(step, split(targets, runtime.blueprint.plan.microbatches, "targets"))
            self.checker.check(instruction)

        return observe

    def _rows_of_rank(self, value: Value) -> Value:
        mesh = self.engine.mesh
        return split(value, mesh.size("dp"), "batch")[mesh.index("dp")]
