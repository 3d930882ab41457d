"""What a layer, and the loss, leave in memory: found by running them once on the meta device.

Numbers stand for storages, so that a trace also says what is the same memory: an output that is kept for the
backward, a gradient that flows on and that weight work waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.footprint.storage_tracker import StorageTracker
from plait.layers.nested import Value, leaf_of, map_tensors, tensors_of
from plait.pipeline.loss_stage import LossLike, LossStage
from plait.pipeline.stage import Gradients, Stage

Numbers = tuple[int | None, ...]


@dataclass(frozen=True)
class PhaseTrace:
    """A forward, or the backward of the input."""

    made: Mapping[int, int]
    """The bytes of each storage that is made here and outlives it."""
    held: tuple[int, ...]
    """What is kept for what comes later."""
    flows: Numbers
    """The outputs, or the gradients of the inputs; none where no gradient flows."""
    most: int
    """The most bytes within it, beyond those that it begins with."""


@dataclass(frozen=True)
class Trace:
    """One layer, or the loss, of one micro-batch."""

    inputs: Numbers
    seeds: Numbers
    """The gradients of the outputs."""
    forward: PhaseTrace
    backward: PhaseTrace
    weights: int = 0
    """The most bytes within the weight work, beyond those that it begins with."""
    output_is_read: bool = False
    """Whether the backward looks at the output."""


def trace_layer(stage: Stage, given: Value) -> tuple[Trace, Value]:
    """Trace the only layer of a stage on meta, for an input like `given`; and a value like its output.

    A layer whose backward does not run on meta is taken to keep until `W` what it keeps for `I`.
    """
    watch = StorageTracker()
    with watch.watching():
        value = map_tensors(_like, given)
        inputs = _numbers(watch, tensors_of(value))
        stage.feed(0, value)
        del value
        forward = _Recording(watch)
        stage.forward(0, 0)
        output_is_read = stage.output_is_read(0)
        output = stage.take_output(0)
        forward.end(tensors_of(output))
        following = map_tensors(_like, output)
        seeds: Gradients = [_like(t) if t.requires_grad else None for t in tensors_of(output)]
        del output
        apart, numbers = _numbers(watch, tensors_of(following)), _numbers(watch, seeds)
        forward.keep(watch.alive() - {*apart, *numbers})
        watch.follow(stage.runs[0, 0].outputs)
        stage.seed(0, seeds)
        del seeds
        backward = _trace_backward(watch, stage, apart)
        weights = _Recording(watch)
        if backward is not None:
            stage.backward_weight(0, 0)
        weights.end(())
        stage.clear()
    resident = watch.alive()
    first = forward.phase(resident)
    second = _unknown(first, given) if backward is None else backward.phase(resident)
    return Trace(inputs, numbers, first, second, weights.phase(resident).most, output_is_read), following


def trace_loss(loss: LossLike, given: Value, targets: Value) -> Trace:
    """Trace the loss of an output like `given`. One that does not run on meta is taken to copy its input."""
    try:
        return _trace_loss(loss, given, targets)
    except Exception:
        return _copying(given)


def _trace_backward(watch: StorageTracker, stage: Stage, apart: Numbers) -> _Recording | None:
    """From the seeds to the gradients of the input; None where it does not run."""
    backward = _Recording(watch)
    try:
        stage.backward_input(0, 0)
    except Exception:
        return None
    gradients = stage.take_gradients(0)
    backward.end(gradients)
    del gradients
    backward.keep(watch.alive() - {*apart})
    return backward


def _unknown(forward: PhaseTrace, given: Value) -> PhaseTrace:
    """A backward of which nothing is known: all that was kept still is, and gradients are like the inputs."""
    first = max((*forward.held, *forward.made), default=0) + 1
    tensors = dict(enumerate(tensors_of(given), start=first))
    made = {number: tensor.nbytes for number, tensor in tensors.items() if tensor.requires_grad}
    flows = tuple(number if number in made else None for number in tensors)
    return PhaseTrace(made, forward.held, flows, sum(made.values()))


def _trace_loss(loss: LossLike, given: Value, targets: Value) -> Trace:
    watch = StorageTracker()
    end = LossStage(_Followed(loss, watch))
    with watch.watching():
        output = map_tensors(_like, given)
        inputs = _numbers(watch, tensors_of(output))
        end.begin([targets], torch.ones((), dtype=torch.float64))
        forward = _Recording(watch)
        end.compute(0, output)
        forward.end(())
        del output
        forward.keep(watch.alive())
        backward = _Recording(watch)
        gradients = end.seed(0)
        backward.end(gradients)
        del gradients
    resident = watch.alive()
    return Trace(inputs, (), forward.phase(resident), backward.phase(resident))


def _copying(given: Value) -> Trace:
    """A loss that keeps a copy of its input in float32 at least, as losses are computed."""
    tensors = list(tensors_of(given))
    count = len(tensors)
    learning = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    copies = {count + place: tensors[place].numel() * max(4, tensors[place].itemsize) for place in learning}
    gradients = {2 * count + place: tensors[place].nbytes for place in learning}
    flows = tuple(2 * count + place if place in learning else None for place in range(count))
    forward = PhaseTrace(copies, (*range(count), *copies), (), sum(copies.values()))
    return Trace(
        tuple(range(count)), (), forward, PhaseTrace(gradients, (), flows, 2 * sum(gradients.values()))
    )


class _Recording:
    """What is alive while a phase runs, from when this is made."""

    def __init__(self, watch: StorageTracker) -> None:
        self._watch = watch
        self._start = watch.alive()
        self._first = len(watch.samples)
        self._samples: Sequence[frozenset[int]] = ()
        self._held: Collection[int] = ()
        self._flows: Numbers = ()

    def end(self, flows: Iterable[Tensor | None]) -> None:
        """The phase is over, and this flows on."""
        self._samples = [*self._watch.samples[self._first :], self._watch.alive()]
        self._flows = _numbers(self._watch, flows)

    def keep(self, held: Collection[int]) -> None:
        """This is kept for later."""
        self._held = held

    def phase(self, resident: Collection[int]) -> PhaseTrace:
        """The phase; what is `resident`, parameters say, was there before and stays."""
        sizes = self._watch.sizes

        def total(numbers: Iterable[int]) -> int:
            return sum(sizes[number] for number in numbers if number not in resident)

        held = tuple(number for number in sorted(self._held) if number not in resident)
        left = {*held, *(number for number in self._flows if number is not None)}
        made = {number: sizes[number] for number in sorted(left - self._start)}
        return PhaseTrace(made, held, self._flows, max(map(total, self._samples)) - total(self._start))


@dataclass(frozen=True)
class _Followed:
    """A loss whose backward is watched."""

    loss: LossLike
    watch: StorageTracker

    def total(self, output: Any, targets: Any) -> Tensor:
        total = self.loss.total(output, targets)
        self.watch.follow([total])
        return total


def _like(tensor: Tensor) -> Tensor:
    return leaf_of(torch.empty_like(tensor, device="meta"), tensor.requires_grad)


def _numbers(watch: StorageTracker, tensors: Iterable[Tensor | None]) -> Numbers:
    return tuple(None if tensor is None else watch.number(tensor) for tensor in tensors)
