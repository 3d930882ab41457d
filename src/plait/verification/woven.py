"""The woven run of one rank, compared with the recording step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.engine import Engine, Parts
from plait.layout import shard
from plait.models.initial import initial_value
from plait.pipeline.sequence import LayerSequence
from plait.pipeline.values import Value, split
from plait.schedules.program import Instruction
from plait.verification.difference import HERE, Findings, origin_of
from plait.verification.observer import Observer
from plait.verification.place import WHOLE, Key, Moment, Phase, Place
from plait.verification.recipe import Recipe
from plait.verification.recording import NOTHING, Recording
from plait.verification.values import Change


class Woven:
    """The woven run of one rank, compared with the recording."""

    def __init__(self, engine: Engine, recipe: Recipe, recording: Recording, layers: int) -> None:
        self.engine = engine
        self.recording = recording
        self.isolate = recipe.isolate
        self.findings = Findings(layers)
        self.parameters = dict(engine.named_parameters())
        self.optimizer = recipe.optimizer(engine.parameter_groups(recipe.weight_decay))
        self.observer: Observer | None = None
        self.epsilon = 0.0
        if recipe.mode != "exact":
            kinds = {p.dtype for p in self.parameters.values() if p.is_floating_point()}
            self.epsilon = max((torch.finfo(kind).eps for kind in kinds), default=0.0)

    def start(self, sequence: LayerSequence, change: Change, seed: int) -> None:
        """Compare the initial values, and put what both sides start from in their place."""
        layouts, coordinate = self.engine.layouts, self.engine.mesh.coordinate
        for name, parameter in self.parameters.items():
            layer = sequence.layers[sequence.users[name][0]]
            whole = initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), seed)
            expected = shard(whole, layouts[name], coordinate).to(parameter)
            place = Place(0, Phase.INITIAL, name=name)
            self.findings.compare(
                place, parameter, expected, NOTHING, origin=origin_of(layouts[name], coordinate)
            )
            with torch.no_grad():
                parameter.copy_(shard(change(name, whole), layouts[name], coordinate))

    def train(self, step: int, inputs: Value, targets: Value) -> None:
        """A step: forward and backward under observation, the norm, the optimizer."""
        moment = Moment(step, WHOLE)
        recorded = self.recording.values[moment]
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        if self.engine.mesh.rank == 0:
            self._compare(step, Phase.BATCH, Key("whole"), recorded[Key("mean")].clone())
        self.optimizer.zero_grad()
        self.engine.observe(self._observe(step, self._share(targets)))
        mean = self.engine.forward_backward(self._share(inputs), self._share(targets))
        self.engine.observe(None)
        self._compare_gradients(step, Phase.REDUCTION, "final")
        self._compare(step, Phase.MEAN_LOSS, Key("mean"), mean)
        norm = self.engine.clip_grad_norm_(float(recorded[Key("clip")]))
        if not self._compare(step, Phase.NORM, Key("norm"), norm) and self.isolate:
            for name, parameter in self.parameters.items():  # they were scaled by the wrong norm
                if parameter.grad is not None:
                    parameter.grad.copy_(self._piece(name, recorded[Key("clipped", name=name)]))
        factor = float(recorded[Key("clip")]) / (float(recorded[Key("norm")]) + 1e-6)
        mistakes = [("it was not scaled", 1.0), ("it was scaled twice", factor**2)]
        self._compare_gradients(step, Phase.CLIP, "clipped", mistakes)
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            hints = [("it was not updated", before[name])]
            key = Key("value", name=name)
            self._compare(step, Phase.OPTIMIZER, key, parameter, name, hints, before[name])
            for entry, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor):
                    self._compare(step, Phase.OPTIMIZER, Key("state", name=f"{name}/{entry}"), state, name)

    def evaluate(self, step: int, inputs: Value, targets: Value) -> None:
        """The loss without training."""
        mean = self.engine.evaluate(self._share(inputs), self._share(targets))
        self._compare(step, Phase.EVALUATION, Key("evaluation"), mean)

    def _observe(self, step: int, targets: Value) -> Callable[[Instruction, Parts], None]:
        def observe(instruction: Instruction, parts: Parts) -> None:
            if self.observer is None:
                self.observer = Observer(
                    parts, self.recording, self.findings, epsilon=self.epsilon, isolate=self.isolate
                )
            if self.observer.step != step:
                self.observer.begin(step, split(targets, parts.plan.microbatches, "targets"))
            self.observer(instruction, parts)

        return observe

    def _compare_gradients(
        self, step: int, phase: Phase, kind: str, mistakes: Sequence[tuple[str, float]] = ()
    ) -> None:
        """`mistakes`: by what the final gradient may have been multiplied instead, after a sentence."""
        recorded = self.recording.values[Moment(step, WHOLE)]
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                assert parameter.grad is not None
                final = self._piece(name, recorded[Key("final", name=name)])
                hints = [(text, final * factor) for text, factor in mistakes]
                before = self.recording.values.get(Moment(step - 1, WHOLE), {}).get(Key("clipped", name=name))
                if before is not None and phase is Phase.REDUCTION:
                    hints.append(
                        ("the gradient of the step before is still in it", final + self._piece(name, before))
                    )
                self._compare(step, phase, Key(kind, name=name), parameter.grad, name, hints)

    def _compare(
        self,
        step: int,
        phase: Phase,
        key: Key,
        actual: Tensor,
        name: str = "",
        alternatives: Sequence[tuple[str, Tensor]] = (),
        base: Tensor | None = None,
    ) -> bool:
        """Compare a tensor of a step as a whole; a parameter's is this rank's piece of the recorded one."""
        moment = Moment(step, WHOLE)
        expected, origin = self.recording.values[moment][key], HERE
        layout, coordinate = self.engine.layouts.get(name), self.engine.mesh.coordinate
        # Of a parameter without dims a rank has all (0-d) or nothing (1-d); a count has no dims anywhere.
        if layout is not None and tuple(expected.shape) == layout.shape and (expected.dim() or actual.dim()):
            expected, origin = shard(expected, layout, coordinate), origin_of(layout, coordinate)
        equal = self.findings.compare(
            Place(step, phase, name=key.name),
            actual,
            expected,
            self.recording.bounds[moment][key],
            origin=origin,
            alternatives=lambda: alternatives,
            base=base,
        )
        if not equal and self.isolate:
            actual.data.copy_(expected)
        return equal

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        return shard(whole, self.engine.layouts[name], self.engine.mesh.coordinate)

    def _share(self, value: Value) -> Value:
        """This data-parallel rank's rows of a global batch."""
        mesh = self.engine.mesh
        return split(value, mesh.size("dp"), "batch")[mesh.index("dp")]
