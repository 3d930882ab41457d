"""Compares replayed graphs with eager runs of the same segments: the first difference, and its reason.

Each segment is replayed on what enters it, then runs eagerly on the same, and the step goes on with the eager
results. So a difference is that segment's own, or that of an earlier one of the same micro-batch and stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.engine.cuda_graphs.microbatch_graphs import LossState, MicrobatchGraphs, StageState
from plait.engine.cuda_graphs.recordable_segments import SegmentPlace
from plait.engine.pipeline.stage import Gradients
from plait.engine.sharding.unit import Unit
from plait.tensor.dropout import DropoutGenerator
from plait.tensor.nested_values import Value, list_of_tensors

TOLERANCE = 1e-10
"""Of a difference, relative to the largest eager value, by default: both compute the same in fp64."""

UNKNOWN = "the graph reads a number, or memory, that is not what would be read now"
"""Of what has changed."""
INPUT_GRADIENT = "the gradient of input"


@dataclass(frozen=True)
class ReplayDifference:
    """A result of a replayed graph that differs from that of its segment run eagerly."""

    segment: str
    """Its name, such as `0F3`: stage, kind and micro-batch."""
    what: str
    """The result that differs."""
    error: float
    """The largest difference, relative to the largest eager value."""
    cause: str

    def __str__(self) -> str:
        return f"{self.what} of {self.segment} differs by {self.error:.1e} when it is replayed: {self.cause}"


@dataclass
class _ReplayedState:
    """Activations and gradients that a replayed segment reads and writes, in place of its stage's."""

    values: dict[int, Value] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)


@dataclass
class _ReplayedLoss:
    targets: list[Value]
    summed: dict[int, Tensor] = field(default_factory=dict)


class ReplayCheck:
    """Compares replayed segments with eager ones, and collects the differences in the order of the step."""

    def __init__(
        self, units: Mapping[str, Unit], dropout: DropoutGenerator, tolerance: float = TOLERANCE
    ) -> None:
        """`tolerance`: of a difference, relative to the largest eager value."""
        self.differences: list[ReplayDifference] = []
        self._units, self._dropout, self._tolerance = units, dropout, tolerance

    def compare(
        self,
        place: SegmentPlace,
        graphs: MicrobatchGraphs,
        stage: StageState,
        loss: LossState | None,
        compute: Callable[[], None],
    ) -> None:
        """Replay the segment at `place`, undo its gradients, run `compute` instead, and compare both."""
        number, gradients = place.microbatch, self._gradients_of(place.stage)
        before = [one.clone() for one in gradients.values()]
        state, of_loss = _ReplayedState(), None if loss is None else _ReplayedLoss(loss.targets)
        if number in stage.values:
            state.values[number] = stage.values[number]
        if number in stage.gradients:
            state.gradients[number] = stage.gradients[number]
        graphs.replay(place, state, of_loss)
        replayed = self._results(
            place, state, of_loss, {name: one.clone() for name, one in gradients.items()}
        )
        for one, value in zip(gradients.values(), before, strict=True):
            one.copy_(value)
        compute()
        eager = self._results(place, stage, loss, gradients)
        for what, other in replayed.items():
            self._note(place, graphs, what, other, eager[what])

    def compare_update(
        self, tensors: Mapping[str, Tensor], replay: Callable[[], None], update: Callable[[], object]
    ) -> None:
        """Replay an optimizer's step, restore `tensors`, run `update` instead, and compare both."""
        before = {name: one.detach().clone() for name, one in tensors.items()}
        replay()
        replayed = {name: one.detach().clone() for name, one in tensors.items()}
        with torch.no_grad():
            for name, one in tensors.items():
                one.copy_(before[name])
        update()
        for name, one in tensors.items():
            changes = [(made.detach() - before[name]).double() for made in (replayed[name], one)]
            self._note_update(name, *changes)

    def _note_update(self, name: str, replayed: Tensor, eager: Tensor) -> None:
        if not eager.numel():
            return
        largest, error = float(eager.abs().max()), float((replayed - eager).abs().max())
        if error <= self._tolerance * largest:
            return
        factor = float((replayed * eager).sum() / (eager * eager).sum())
        is_scaled = torch.allclose(replayed, factor * eager, rtol=1e-6, atol=0)
        cause = (
            f"it changes by {factor:g} times as much, as with the learning rate of another step"
            if is_scaled
            else UNKNOWN
        )
        relative = error / largest if largest else float("inf")
        self.differences.append(ReplayDifference("the optimizer's step", name, relative, cause))

    def _gradients_of(self, stage: int) -> dict[str, Tensor]:
        units = (unit for unit in self._units.values() if stage in unit.stages)
        pairs = (pair for unit in units for pair in unit.gradients_of(stage).items())
        return {f"the gradient of {name}": one for (name, _), one in pairs if one.untyped_storage().nbytes()}

    def _results(
        self,
        place: SegmentPlace,
        state: StageState,
        loss: LossState | None,
        gradients: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return all that a segment has computed, by name."""
        number, results = place.microbatch, dict[str, Tensor]()
        if loss is not None and number in loss.summed:
            results["the loss"] = loss.summed[number]
        outputs = list_of_tensors(state.values[number]) if number in state.values else []
        results |= {f"output {position}": one.detach() for position, one in enumerate(outputs)}
        for position, one in enumerate(state.gradients.get(number, ())):
            if one is not None:
                results[f"{INPUT_GRADIENT} {position}"] = one
        return results | dict(gradients)

    def _note(
        self, place: SegmentPlace, graphs: MicrobatchGraphs, what: str, replayed: Tensor, eager: Tensor
    ) -> None:
        """Note a difference, if there is one."""
        if not eager.numel():
            return
        one, other = replayed.double(), eager.double()
        largest = float(other.abs().max())
        error = float((one - other).abs().max())
        if error <= self._tolerance * largest:
            return
        cause = self._cause(place, graphs, what, one, other)
        self.differences.append(
            ReplayDifference(place.name, what, error / largest if largest else float("inf"), cause)
        )

    def _cause(
        self, place: SegmentPlace, graphs: MicrobatchGraphs, what: str, replayed: Tensor, eager: Tensor
    ) -> str:
        if not self._dropout.has_filled(graphs.masks, place.microbatch):
            return "the table has the keys of another step's or another micro-batch's dropout masks"
        factor = float((replayed * eager).sum() / (eager * eager).sum())
        is_scaled = torch.allclose(replayed, factor * eager, rtol=self._tolerance, atol=0)
        if is_scaled and what.startswith(INPUT_GRADIENT):
            return f"it is {factor:g} times the eager one, as with the loss scale of another step"
        return UNKNOWN
