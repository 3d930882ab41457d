"""Traces of the memory that a layer or the loss allocates and saves, recorded on the meta device.

Storages are numbered, so that a trace also shows what shares memory: an output that is saved for the
backward, or an output gradient that is passed on and saved for the weight gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.engine.pipeline.loss_stage import ChunkedLossStage, LossStage
from plait.engine.pipeline.stage import Gradients, Stage
from plait.estimate.memory.operation_recorder import OperationRecorder, recording
from plait.estimate.memory.remembered_results import RememberedResults
from plait.estimate.memory.storage_tracker import StorageTracker
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.nested_values import Value, leaf_of, map_tensors, tensors_of

StorageNumbers = tuple[int | None, ...]
"""The storage numbers of several tensors; None for a missing tensor."""


@dataclass(frozen=True)
class PhaseTrace:
    """Memory that the forward of a layer, or its backward for input gradients, allocates and saves."""

    allocated: Mapping[int, int]
    """The bytes of each new storage that outlives the phase."""
    saved: tuple[int, ...]
    """The storages that are saved for later phases."""
    results: StorageNumbers
    """The outputs, or the gradients of the inputs."""
    peak: int
    """Peak bytes within the phase, minus the bytes at its start."""


@dataclass(frozen=True)
class Trace:
    """Memory that forward and backward of one layer, or of the loss, allocate and save for a micro-batch."""

    inputs: StorageNumbers
    output_gradients: StorageNumbers
    forward: PhaseTrace
    backward: PhaseTrace
    weight_peak: int = 0
    """Peak bytes within the backward of the weights, minus the bytes at its start."""
    whole_backward_peak: int | None = None
    """Peak bytes within a backward of inputs and weights, minus the bytes at its start, if weight gradients
    run during its collectives; None: not known, assumed to be that of one after the other."""
    output_is_read: bool = False
    """Whether the backward reads the output."""


def trace_layer(
    stage: Stage, given: Value, recorder: OperationRecorder | None = None, *, on_cpu: bool = True
) -> tuple[Trace, Value]:
    """Return the memory that a one-layer stage allocates and saves for the input `given`, and its output.

    It runs on the meta device; `recorder` records its operations. A layer whose backward does not run there
    is assumed to save for `W` all that it saves for `I`. `on_cpu`: whether it would run on a CPU.
    """
    tracker = StorageTracker(on_cpu=on_cpu)
    with tracker.tracking():
        value = map_tensors(meta_leaf, given)
        inputs = _numbers(tracker, tensors_of(value))
        stage.values[0] = value
        del value
        forward = _PhaseRecorder(tracker)
        with recording(recorder, "forward", tracker.see_results):
            stage.forward(0, 0)
        output_is_read = stage.output_is_read(0)
        output = stage.values.pop(0)
        forward.end(tensors_of(output))
        following = map_tensors(meta_leaf, output)
        seeds: Gradients = [
            torch.empty_like(t, device="meta") if t.requires_grad else None for t in tensors_of(output)
        ]
        del output
        next_inputs, numbers = _numbers(tracker, tensors_of(following)), _numbers(tracker, seeds)
        forward.saved = tracker.live() - {*next_inputs, *numbers}
        stage.gradients[0] = seeds
        del seeds
        backward = _trace_backward(tracker, stage, next_inputs, recorder)
        weights = _PhaseRecorder(tracker)
        if backward is not None:
            with recording(recorder, "weights", tracker.see_results):
                stage.backward_weight(0, 0)
        elif recorder is not None:
            recorder.assume_backward()
        weights.end(())
        stage.clear()
    resident = tracker.live()
    first = forward.phase(resident)
    second = _unknown_backward(first, given) if backward is None else backward.phase(resident)
    peak = weights.phase(resident).peak
    return Trace(inputs, numbers, first, second, peak, output_is_read=output_is_read), following


def whole_backward_peak(stage: Stage, given: Value, *, on_cpu: bool = True) -> int | None:
    """Return the peak bytes of a one-layer stage's backward of inputs and weights, minus those at its start.

    Weight gradients run during collectives. None where the backward does not run on the meta device.
    """
    tracker = StorageTracker(on_cpu=on_cpu)
    with tracker.tracking(), RememberedResults(tracker.see_results):
        stage.values[0] = map_tensors(meta_leaf, given)
        stage.forward(0, 0)
        outputs = tensors_of(stage.values.pop(0))
        seeds = [torch.empty_like(one, device="meta") if one.requires_grad else None for one in outputs]
        backward = _PhaseRecorder(tracker)
        stage.gradients[0] = seeds
        del outputs, seeds
        try:
            stage.backward(0, 0)
        except Exception:
            return None
        finally:
            stage.gradients.clear()
            backward.end(())
            stage.clear()
    return backward.phase(tracker.live()).peak


def trace_loss(
    end: LossStage, given: Value, targets: Value, recorder: OperationRecorder | None = None
) -> Trace:
    """Return the memory that the loss allocates and saves; if it cannot run on meta, an estimate.

    `recorder` records its operations.
    """
    try:
        return _trace_loss(end, given, targets, recorder)
    except Exception:
        if recorder is not None:
            recorder.assume_backward()
        return _copying_loss(given)


def trace_chunked_loss(
    end: ChunkedLossStage,
    queue: WeightGradientQueue,
    given: Value,
    targets: Value,
    recorder: OperationRecorder | None = None,
) -> Trace:
    """Return the memory that the last linear and the loss allocate and save, computed in chunks of rows.

    What its backward saves in `queue` is for `W`. `recorder` records its operations.
    """
    return _trace_loss(end, given, targets, recorder, queue)


def _trace_backward(
    tracker: StorageTracker,
    stage: Stage,
    next_inputs: StorageNumbers,
    recorder: OperationRecorder | None,
) -> _PhaseRecorder | None:
    """Run the backward for input gradients, and record its memory; None where it fails on the meta device."""
    backward = _PhaseRecorder(tracker)
    try:
        with recording(recorder, "backward", tracker.see_results):
            stage.backward_input(0, 0)
    except Exception:
        return None
    gradients = stage.gradients.pop(0)
    backward.end(gradients)
    del gradients
    backward.saved = tracker.live() - {*next_inputs}
    return backward


def _unknown_backward(forward: PhaseTrace, given: Value) -> PhaseTrace:
    """Return the memory assumed for a backward that fails on meta: all saved tensors, and input gradients."""
    first = max((*forward.saved, *forward.allocated), default=0) + 1
    tensors = dict(enumerate(tensors_of(given), start=first))
    allocated = {number: tensor.nbytes for number, tensor in tensors.items() if tensor.requires_grad}
    results = tuple(number if number in allocated else None for number in tensors)
    return PhaseTrace(allocated, forward.saved, results, sum(allocated.values()))


def _trace_loss(
    end: LossStage,
    given: Value,
    targets: Value,
    recorder: OperationRecorder | None,
    queue: WeightGradientQueue | None = None,
) -> Trace:
    tracker = StorageTracker()
    with tracker.tracking():
        output = map_tensors(meta_leaf, given)
        inputs = _numbers(tracker, tensors_of(output))
        end.begin([targets], torch.ones((), dtype=torch.float64))
        forward = _PhaseRecorder(tracker)
        with recording(recorder, "forward", tracker.see_results):
            end.compute(0, output)
        forward.end(())
        del output
        forward.saved = tracker.live()
        backward = _PhaseRecorder(tracker)
        with recording(recorder, "backward", tracker.see_results):
            gradients = end.seed(0)
        backward.end(gradients)
        del gradients
        if queue is not None:
            backward.saved = tracker.live()
            queue.take()
    resident = tracker.live()
    return Trace(inputs, (), forward.phase(resident), backward.phase(resident))


def _copying_loss(given: Value) -> Trace:
    """Return the memory assumed for a loss that fails on meta: a copy of its input, in float32 at least."""
    tensors = list(tensors_of(given))
    count = len(tensors)
    learning = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    copies = {count + index: tensors[index].numel() * max(4, tensors[index].itemsize) for index in learning}
    gradients = {2 * count + index: tensors[index].nbytes for index in learning}
    results = tuple(2 * count + index if index in learning else None for index in range(count))
    forward = PhaseTrace(copies, (*range(count), *copies), (), sum(copies.values()))
    return Trace(
        tuple(range(count)), (), forward, PhaseTrace(gradients, (), results, 2 * sum(gradients.values()))
    )


class _PhaseRecorder:
    """Records the storages alive in a phase (forward or backward), from the recorder's start to `end`."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._start = tracker.live()
        self._first = len(tracker.samples)
        self._samples: Sequence[frozenset[int]] = ()
        self.saved: Collection[int] = ()
        """The storages that are saved for later phases."""
        self._results: StorageNumbers = ()

    def end(self, results: Iterable[Tensor | None]) -> None:
        """End the phase, and record the storages of its `results`."""
        self._samples = [*self._tracker.samples[self._first :], self._tracker.live()]
        self._results = _numbers(self._tracker, results)

    def phase(self, resident: Collection[int]) -> PhaseTrace:
        """Return the phase's memory without the storages in `resident`, which are allocated at all times."""
        sizes = self._tracker.sizes
        counted = [0 if number in resident else size for number, size in enumerate(sizes)]

        def total(numbers: Iterable[int]) -> int:
            return sum(map(counted.__getitem__, numbers))

        saved = tuple(number for number in sorted(self.saved) if number not in resident)
        left = {*saved, *(number for number in self._results if number is not None)}
        allocated = {number: sizes[number] for number in sorted(left - self._start)}
        return PhaseTrace(
            allocated, saved, self._results, max(map(total, self._samples)) - total(self._start)
        )


def meta_leaf(tensor: Tensor) -> Tensor:
    """Return a new tensor like `tensor` on the meta device, without an autograd history."""
    return leaf_of(torch.empty_like(tensor, device="meta"), tensor.requires_grad)


def _numbers(tracker: StorageTracker, tensors: Iterable[Tensor | None]) -> StorageNumbers:
    return tuple(None if tensor is None else tracker.number(tensor) for tensor in tensors)
