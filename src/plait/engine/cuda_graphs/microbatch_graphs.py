"""The graphs of one micro-batch at one stage, from its first forward to its last weight gradient.

    stage before ──copy──→ value_in      ── F ──→ value_out    ──copy──→ next stage
    stage before ←──copy── gradients_out ←── I ── gradients_in ←──copy── next stage

A graph reads and writes the memory with which it was recorded. So what enters a stage is copied to where the
first graph reads it, and what leaves is copied out, since the next micro-batch in the same slot computes into
the same memory. Between the segments of a micro-batch nothing is copied: each leaves its result where the
next one reads it. Autograd runs while graphs are recorded, never when they are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.engine.cuda_graphs.graph_recorder import GraphRecorder, RecordedWork
from plait.engine.cuda_graphs.recordable_segments import SegmentPlace
from plait.engine.pipeline.stage import Gradients
from plait.errors import PlanError
from plait.schedules.action import Kind
from plait.tensor.cuda_graph_dropout_keys import MaskTable
from plait.tensor.nested_values import Value, leaf_of, list_of_tensors, map_tensors


class StageState(Protocol):
    """Protocol: activations and gradients that a stage holds by micro-batch; a `Stage` is one."""

    values: dict[int, Value]
    gradients: dict[int, Gradients]


class LossState(Protocol):
    """Protocol: values that the loss stage holds by micro-batch; a `LossStage` is one."""

    targets: list[Value]
    summed: dict[int, Tensor]


@dataclass
class _RecordedSegment:
    """A recorded segment, and the tensors through which micro-batches enter and leave it."""

    recording: RecordedWork
    value_in: Value = None
    """The activation that it reads; None if none."""
    gradients_in: Gradients | None = None
    value_out: Value = None
    """The activation that it leaves to the next instruction; None if none."""
    gradients_out: Gradients | None = None
    total: Tensor | None = None
    """The micro-batch's summed loss, if the segment computes it."""


@dataclass
class MicrobatchGraphs:
    """CUDA graphs of one stage for one slot: micro-batches of equal shape replay them one after another."""

    pool: Any
    """The slot's memory: its graphs are always replayed in the order in which they were recorded."""
    masks: MaskTable
    """The keys of the dropouts' masks."""
    segments: list[_RecordedSegment] = field(default_factory=list)
    targets: Value = None
    """The micro-batch's targets, where graphs read them."""

    def record(
        self,
        place: SegmentPlace,
        stage: StageState,
        loss: LossState | None,
        compute: Callable[[], None],
        recorder: GraphRecorder,
    ) -> None:
        """Run `compute`, the segment at `place`, and record it. `loss`: of the last stage."""
        number = place.microbatch
        if loss is not None and place.number == 0:
            self.targets = _copied(loss.targets[number])
            loss.targets[number] = self.targets
        forward, backward = place.kind is Kind.F, place.kind in (Kind.I, Kind.B)
        value_in = self._entering(stage.values.get(number)) if forward else None
        gradients_in = self._entering_gradients(stage.gradients.get(number)) if backward else None
        if value_in is not None:
            stage.values[number] = value_in
        if gradients_in is not None:
            stage.gradients[number] = gradients_in
        known = loss is not None and number in loss.summed
        made = _RecordedSegment(recorder.record(compute, self.pool), value_in, gradients_in)
        if forward:
            made.value_out = stage.values.get(number)
        if backward:
            made.gradients_out = stage.gradients.get(number)
        if loss is not None and not known:
            made.total = loss.summed.get(number)
        self.segments.append(made)
        _store_results(made, place, stage, loss)

    def replay(self, place: SegmentPlace, stage: StageState, loss: LossState | None) -> None:
        """Replay the recorded graph of the segment at `place` on its micro-batch's tensors."""
        number, segment = place.microbatch, self.segments[place.number]
        if loss is not None and place.number == 0:
            _copy_to(list_of_tensors(self.targets), list_of_tensors(loss.targets[number]), place, "targets")
        if segment.value_in is not None:
            value = stage.values.pop(number)
            if value is not segment.value_in:
                _copy_to(list_of_tensors(segment.value_in), list_of_tensors(value), place, "an input")
        if segment.gradients_in is not None:
            gradients = stage.gradients.pop(number)
            if gradients is not segment.gradients_in:
                _copy_to(segment.gradients_in, gradients, place, "gradients")
        segment.recording.replay()
        _store_results(segment, place, stage, loss)

    def _entering(self, value: Value) -> Value:
        """Return `value` where the next graph is to read it: a copy, unless the graph before has made it."""
        if value is None or (self.segments and value is self.segments[-1].value_out):
            return value
        return _copied(value)

    def _entering_gradients(self, gradients: Gradients | None) -> Gradients | None:
        if gradients is None or (self.segments and gradients is self.segments[-1].gradients_out):
            return gradients
        return [None if one is None else _copied_tensor(one) for one in gradients]


def _store_results(
    segment: _RecordedSegment, place: SegmentPlace, stage: StageState, loss: LossState | None
) -> None:
    """Give a segment's results to the next instructions; copies of those that leave the stage."""
    number, leaves = place.microbatch, place.leaves_stage
    if segment.value_out is not None:
        stage.values[number] = _copied(segment.value_out) if leaves else segment.value_out
    if (gradients := segment.gradients_out) is not None:
        copies = [None if one is None else _copied_tensor(one) for one in gradients] if leaves else gradients
        stage.gradients[number] = copies
    if segment.total is not None and loss is not None:
        loss.summed[number] = segment.total.clone()


def _copied(value: Value) -> Value:
    """Return a copy of `value`, whose tensors are leaves with the same strides and `requires_grad`."""
    return map_tensors(lambda tensor: leaf_of(_copied_tensor(tensor), tensor.requires_grad), value)


def _copied_tensor(tensor: Tensor) -> Tensor:
    if 0 in tensor.stride():  # elements share memory
        return tensor.detach().clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )


def _copy_to(
    targets: Sequence[Tensor | None], sources: Sequence[Tensor | None], place: SegmentPlace, what: str
) -> None:
    """Copy a segment's inputs to the memory that its graph reads. Raises PlanError for other shapes."""
    given, recorded = (
        [None if one is None else tuple(one.shape) for one in both] for both in (sources, targets)
    )
    if given != recorded:
        raise PlanError(
            f"{place.name} was given {what} of shape {given}, but its graph was recorded for {recorded}: "
            "leave plan.cuda_graphs out, and report this as a mistake of plait."
        )
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if target is not None and source is not None:
                target.copy_(source)
