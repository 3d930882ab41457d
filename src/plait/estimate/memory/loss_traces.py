"""Traces of the loss on the meta device; one that is computed chunk by chunk is traced for few chunks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.engine.pipeline.loss_stage import ChunkedLossStage, LossStage, OverwritingLossStage
from plait.estimate.memory.layer_traces import Trace, trace_chunked_loss, trace_loss
from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.time.layer_work import LayerWork, elementwise_totals, extrapolated
from plait.estimate.time.operation_times import Elementwise
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.nested_values import Value

CHUNKS = (3, 4)
"""Whole chunks of rows for which such a loss is traced; what more of them need follows from both."""
TracedLoss = tuple[Trace, LayerWork | None]
"""The memory of the loss, and its operations; None where they are not recorded."""


def traced_loss(
    end: LossStage,
    queue: WeightGradientQueue,
    given: Value,
    targets: Value,
    recorder: OperationRecorder | None,
) -> TracedLoss:
    """Return the memory that the loss of the output `given` allocates and saves, and its operations.

    The element-wise operations of a loss that is computed chunk by chunk are one, with the bytes and kernels
    of all: so losses of other rows have as many operations.
    """
    step = _rows_at_once(end, given)
    if step is None:
        return _traced(end, queue, given, targets, recorder)
    rows, classes = given.reshape(-1, given.shape[-1]), targets.reshape(-1)
    whole, rest = divmod(len(rows), step)
    if whole <= CHUNKS[-1]:
        trace, work = _traced(end, queue, given, targets, recorder)
        return trace, _joined(work)
    counts = [count * step + rest for count in CHUNKS]
    few, more = (_traced(end, queue, rows[:count], classes[:count], recorder) for count in counts)
    forward, further = few[0].forward, whole - CHUNKS[0]
    peak = forward.peak + further * (more[0].forward.peak - forward.peak)
    trace = replace(few[0], forward=replace(forward, peak=peak))
    return trace, extrapolated(_joined(few[1]), _joined(more[1]), further)


def _traced(
    end: LossStage,
    queue: WeightGradientQueue,
    given: Value,
    targets: Value,
    recorder: OperationRecorder | None,
) -> TracedLoss:
    if isinstance(end, ChunkedLossStage):
        trace = trace_chunked_loss(end, queue, given, targets, recorder)
    else:
        trace = trace_loss(end, given, targets, recorder)
    return trace, None if recorder is None else recorder.take(fuses=False)


def _rows_at_once(end: LossStage, given: Value) -> int | None:
    """Return the rows per chunk of a cross-entropy that overwrites logits; None for other losses."""
    loss = end.loss
    if not (isinstance(end, OverwritingLossStage) and isinstance(loss, CrossEntropyInPlace)):
        return None
    if not (isinstance(given, Tensor) and given.is_contiguous() and given.requires_grad and given.numel()):
        return None
    return loss.rows_at_once(given.detach().reshape(-1, given.shape[-1]))


def _joined(work: LayerWork | None) -> LayerWork | None:
    """Return the work with one element-wise operation in the forward, in place of several."""
    if work is None:
        return None
    others = (one for one in work.forward if not isinstance(one, Elementwise))
    return replace(work, forward=(*others, Elementwise(*elementwise_totals(work.forward))))
