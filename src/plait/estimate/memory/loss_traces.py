"""Traces of the loss on the meta device; one that is computed chunk by chunk is traced for few chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from torch import Tensor

from plait.engine.pipeline.loss_stage import ChunkedLossStage, LossStage, OverwritingLossStage
from plait.estimate.memory.layer_traces import Trace, trace_chunked_loss, trace_loss
from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.time.layer_work import LayerWork, extrapolated
from plait.estimate.time.operation_times import DeviceOperation
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.layer_values import Value

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
    """Return the memory that the loss of the output `given` allocates and saves, and its operations."""
    step = _rows_at_once(end, given)
    if step is None:
        return _traced(end, queue, given, targets, recorder)
    rows, classes = given.reshape(-1, given.shape[-1]), targets.reshape(-1)
    whole, rest = divmod(len(rows), step)
    if whole <= CHUNKS[-1]:
        return _traced(end, queue, given, targets, recorder)
    counts = [count * step + rest for count in CHUNKS]
    few, more = (_traced(end, queue, rows[:count], classes[:count], recorder) for count in counts)
    further = whole - CHUNKS[-1]
    forward, before = more[0].forward, few[0].forward
    peak = forward.peak + further * (forward.peak - before.peak)
    trace = replace(more[0], forward=replace(forward, peak=peak))
    if few[1] is None or more[1] is None:
        return trace, None
    return trace, replace(more[1], forward=_repeated(few[1].forward, more[1].forward, further))


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


def _repeated(
    few: tuple[DeviceOperation, ...], more: tuple[DeviceOperation, ...], further: int
) -> tuple[DeviceOperation, ...]:
    """Return the operations of `more`, which has a chunk more than `few`, with so many further chunks.

    Operations before the chunks and behind them may be larger for more rows: they grow linearly.
    """
    size = len(more) - len(few)
    equal = [one == other for one, other in zip(more, more[size:], strict=False)]
    runs = [[*run] for same, run in groupby(range(len(equal)), equal.__getitem__) if same]
    longest = max(runs, key=len)
    first, last = longest[0], longest[-1] + 1  # of the chunks in `few`
    grown = [
        extrapolated(part, other, further + 1)
        for part, other in ((few[:first], more[:first]), (few[last:], more[last + size :]))
    ]
    return (*grown[0], *more[first : last + size], *more[first : first + size] * further, *grown[1])
