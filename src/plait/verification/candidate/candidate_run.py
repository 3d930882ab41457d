"""The parallel run on one rank, compared step by step with the recording of the reference run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.runner import Runtime
from plait.models.initial_values import initial_value
from plait.optimizers.optimizer_makers import optimizer_for
from plait.optimizers.owned_optimizer import Owned
from plait.schedules.lowering.program import Instruction
from plait.tensor.dtypes import convert
from plait.tensor.microbatches import split
from plait.tensor.nested_values import Value
from plait.verification.candidate.instruction_checker import InstructionChecker
from plait.verification.candidate.router_load_comparison import compare_corrections, compare_load
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.expected_dtypes import GROWTH_INTERVAL, INITIAL_LOSS_SCALE
from plait.verification.reference.recording import NO_TOLERANCE
from plait.verification.reference.reference_update import CLIP_EPSILON
from plait.verification.reference.start_values import ValueChange
from plait.verification.step_location import Location, RecordKey, RecordScope, StepPhase


class CandidateRun:
    """One rank of the parallel run, which compares each result with the recorded reference run."""

    def __init__(self, comparison: StepComparison) -> None:
        options = comparison.options
        self.comparison = comparison
        self.engine = comparison.engine
        self.recording = comparison.recording
        self.parameters = comparison.parameters
        self.checker: InstructionChecker | None = None
        groups = self.engine.parameter_groups(options.weight_decay)
        self.optimizer = optimizer_for(self.engine, options.make_optimizer, groups)
        self.norm_type = options.norm_type
        self.norm_kind = "norm" if self.norm_type == 2 else "largest"
        """Kind of the recorded norm that gradients are clipped by."""
        self.norm_differs = False
        """Whether a norm has differed in this step."""

    def start(self, change: ValueChange) -> None:
        """Check initial parameters and loss scale; then apply `change` to each parameter's values."""
        sequence, formats = self.comparison.sequence, self.comparison.formats
        for name, parameter in self.parameters.items():
            layer = sequence.layers[sequence.users[name][0]]
            box, local = self.comparison.box(name), name.removeprefix(f"{layer.path}.")
            whole = initial_value(layer.module, layer.path, local, self.comparison.options.seed)
            master = formats.master_of(sequence.parameters[name])
            expected = convert(box.of(whole), master, parameter.device)
            location = Location(0, StepPhase.INITIAL, name=name)
            self.comparison.findings.compare(location, parameter, expected, NO_TOLERANCE, box=box)
            with torch.no_grad():
                parameter.copy_(box.of(change(name, whole)))
        first = INITIAL_LOSS_SCALE if self.comparison.is_dynamic else formats.loss_scale or 1.0
        self.comparison.compare_loss_scale(0, StepPhase.INITIAL, first)
        if self.engine.adapts_loss_scale:
            settled = self.recording.number(0, "scale")
            state = {"value": settled, "good_steps": GROWTH_INTERVAL - 1}  # so that it grows after one step
            self.engine.run_state = self.engine.run_state | {"loss_scale": state}

    def train(self, step: int, inputs: Value, targets: Value) -> None:
        """Run a training step; compare each instruction, gradient, norm and update with the reference run."""
        comparison = self.comparison
        if self.engine.mesh.rank == 0:
            mean = self.recording.values[RecordScope(step)][RecordKey("mean")].clone()
            comparison.compare(step, StepPhase.BATCH, RecordKey("whole"), mean)
        scale = self.recording.number(step, "scale")
        comparison.compare_loss_scale(step, StepPhase.LOSS_GRADIENT, scale)
        self.optimizer.zero_grad()
        self.engine.observe(self._observer(step, self._rows_of_rank(targets)))
        mean = self.engine.forward_backward(self._rows_of_rank(inputs), self._rows_of_rank(targets))
        self.engine.observe(None)

        def inherited(name: str) -> float:
            """Return the part of a gradient's tolerance that its micro-batches' tolerances contribute."""
            if not self.comparison.resynchronizes:
                return 0.0
            assert self.checker is not None
            return self.checker.weights.tolerance_of(name) * self.engine.mesh.size("dp") / scale

        comparison.compare_gradients(step, StepPhase.REDUCTION, "final", inherited=inherited)
        comparison.compare(step, StepPhase.MEAN_LOSS, RecordKey("mean"), mean)
        compare_load(comparison, step)
        self._update(step)

    def evaluate(self, step: int, inputs: Value, targets: Value) -> None:
        """Evaluate before `step`; compare each instruction's result and the mean loss with the reference."""
        inputs, targets = self._rows_of_rank(inputs), self._rows_of_rank(targets)
        self.engine.observe(self._observer(step, targets, evaluating=True))
        mean = self.engine.evaluate(inputs, targets)
        self.engine.observe(None)
        scope, key = RecordScope(step, evaluated=True), RecordKey("evaluation")
        self.comparison.compare(step, StepPhase.EVALUATION, key, mean, recorded_in=scope)

    def _observer(
        self, step: int, targets: Value, *, evaluating: bool = False
    ) -> Callable[[Instruction, Runtime], None]:
        parts = split(targets, self.engine.plan.microbatches, "targets")
        begun = False

        def observe(instruction: Instruction, runtime: Runtime) -> None:
            nonlocal begun
            if self.checker is None:
                self.checker = InstructionChecker(runtime, self.comparison)
            if not begun:
                begun = True
                self.checker.begin_step(step, parts, evaluating=evaluating)
            self.checker.check(instruction)

        return observe

    def _rows_of_rank(self, value: Value) -> Value:
        mesh = self.engine.mesh
        return split(value, mesh.size("dp"), "batch")[mesh.index("dp")]

    def _update(self, step: int) -> None:
        """Clip the gradients and update: in even steps by `Engine.step`, else by `optimizer.step()`.

        Calls each before with a bound above the norm, which must change nothing; not under a dynamic loss
        scale, which counts the checks of gradients.
        """
        self.norm_differs = False
        if isinstance(self.optimizer, Owned):
            self.optimizer.read_parameters()  # which start, and comparisons, have written to
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        bound, by_engine = self.recording.number(step, "clip"), step % 2 == 0
        if not self.engine.adapts_loss_scale:
            loose = 3 * (self.recording.number(step, "norm") + CLIP_EPSILON)
            self._clip_above_norm(step, lambda: self.engine.clip_grad_norm_(loose))
            if by_engine:
                self._clip_above_norm(step, lambda: self._step_of_another_optimizer(step, loose))
        if by_engine:
            self._engine_step(step, bound)
        else:
            self._compare_norm(step, self.engine.clip_grad_norm_(bound, self.norm_type), self.norm_kind)
            self._compare_clipped(step)
            self.optimizer.step()
        self.comparison.compare_state(step, self.optimizer, before)
        compare_corrections(self.comparison, step)

    def overflow(self, step: int) -> None:
        """Set a gradient to infinity, call `Engine.step`, and check that no rank updates its parameters.

        Compares parameters and optimizer state with their values before, and the loss scale with half of its
        value if it is dynamic. `step` is the number after the last training step.
        """
        trained = [name for name, p in self.comparison.sequence.parameters.items() if p.requires_grad]
        dynamic, constant = self.comparison.is_dynamic, self.comparison.formats.loss_scale
        if not trained or not (dynamic or constant not in (None, 1.0)):
            return
        scale = self.engine.loss_scale
        before = {name: tensor.detach().clone() for name, tensor in self.updated_tensors()}
        poisoned = self.parameters.get(trained[-1])
        if poisoned is not None:
            poisoned.grad = torch.full_like(poisoned, torch.inf)
        self.engine.step(self.optimizer, 1.0)
        mistake = "it was updated, though the gradients of the step were not finite"
        for name, tensor in self.updated_tensors():
            location = Location(step, StepPhase.OPTIMIZER, name=name)
            self.comparison.compare_unchanged(location, tensor, before[name], mistake)
        expected = scale / 2 if dynamic else scale
        self.comparison.compare_loss_scale(step, StepPhase.LOSS_GRADIENT, expected)

    def _clip_above_norm(self, step: int, clip: Callable[[], Tensor]) -> None:
        """Call `clip`, whose bound exceeds the gradient norm; check the norm and that no gradient changes."""
        trained = [name for name, p in self.parameters.items() if p.requires_grad]
        before = {name: self.comparison.gradient(name).clone() for name in trained}
        self._compare_norm(step, clip(), "norm")
        mistake = "it was scaled, though the norm is below the bound"
        for name in trained:
            gradient, location = self.comparison.gradient(name), Location(step, StepPhase.CLIP, name=name)
            self.comparison.compare_unchanged(location, gradient, before[name], mistake)
            self.parameters[name].grad = gradient.copy_(before[name])

    def _step_of_another_optimizer(self, step: int, bound: float) -> Tensor:
        """Call `Engine.step` with another model's optimizer; check its update; return the gradient norm."""
        other = nn.Parameter(torch.zeros((), device=self.engine.mesh.device))
        other.grad = torch.ones_like(other)
        norm = self.engine.step(torch.optim.SGD([other], lr=1.0), bound)
        location = Location(step, StepPhase.OPTIMIZER, name="an optimizer of one step")
        mistake = [("it was not updated", torch.zeros_like(other))]
        expected = torch.full_like(other, -1.0)
        self.comparison.findings.compare(location, other, expected, NO_TOLERANCE, alternatives=mistake)
        return norm

    def _engine_step(self, step: int, bound: float) -> None:
        """Call `Engine.step`, and compare the gradients that it passes to the optimizer."""
        compared = []

        def compare(*_: Any) -> None:
            compared.append(True)
            self._compare_clipped(step)

        handle = self.optimizer.register_step_pre_hook(compare)
        try:
            norm = self.engine.step(self.optimizer, bound, self.norm_type)
        finally:
            handle.remove()
        self._compare_norm(step, norm, self.norm_kind)
        if not compared:
            self._compare_clipped(step)

    def _compare_norm(self, step: int, norm: Tensor, kind: str) -> None:
        """Compare a gradient norm with the reference run's, unless another norm of this step has differed."""
        if not self.norm_differs:
            equal = self.comparison.compare(step, StepPhase.NORM, RecordKey(kind), norm)
            self.norm_differs = not equal

    def _compare_clipped(self, step: int) -> None:
        """Compare the clipped gradients that the optimizer receives with those of the reference run."""
        if self.norm_differs and self.comparison.options.isolate:  # they were scaled by the wrong norm
            self.comparison.set_gradients(step, "clipped")
            return
        norm, bound = (self.recording.number(step, kind) for kind in (self.norm_kind, "clip"))
        factor = min(1.0, bound / (norm + CLIP_EPSILON))
        mistakes = [("it was not scaled", 1.0), ("it was scaled twice", factor**2)] if factor < 1 else []
        self.comparison.compare_gradients(step, StepPhase.CLIP, "clipped", mistakes=mistakes)

    def updated_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters by name, and the tensors of their optimizer state as `parameter/entry`."""
        for name, parameter in self.parameters.items():
            yield name, parameter
            for entry, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor):
                    yield f"{name}/{entry}", state
