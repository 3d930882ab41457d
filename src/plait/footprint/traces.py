"""What a layer, and the loss, leave in memory: found by running them once on the meta device.

Numbers stand for storages, so that a trace also says what is the same memory: an output that is kept for the
backward, a gradient that flows on and that weight work waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.footprint.watch import Watch
from plait.pipeline.loss_end import LossEnd, LossLike
from plait.pipeline.stage import Stage
from plait.pipeline.values import Value, leaf_of, map_tensors, tensors_of


@dataclass(frozen=True)
class Phase:
    """A forward, or the backward of the input."""

    made: Mapping[int, int]
    """The bytes of each storage that is made here and outlives it."""
    held: tuple[int, ...]
    """What is kept for what comes later."""
    flows: tuple[int | None, ...]
    """The outputs, or the gradients of the inputs; none where no gradient flows."""
    most: int
    """The most bytes within it, beyond those that it begins with."""


@dataclass(frozen=True)
class Trace:
    """One layer, or the loss, of one micro-batch."""

    inputs: tuple[int, ...]
    seeds: tuple[int | None, ...]
    """The gradients of the outputs."""
    forward: Phase
    backward: Phase
    weights: int = 0
    """The most bytes within the weight work, beyond those that it begins with."""
    output_is_read: bool = False
    """Whether the backward looks at the output."""


def trace_layer(stage: Stage, given: Value) -> tuple[Trace, Value]:
    """Trace the only layer of a stage on meta, for an input like `given`; and a value like its output."""
    watch = Watch()
    with watch.watching():
        value = map_tensors(_like, given)
        inputs = [watch.number(tensor) for tensor in tensors_of(value)]
        stage.feed(0, value)
        del value
        forward = _Recording(watch)
        stage.forward(0, 0)
        output_is_read = stage.output_is_read(0)
        output = stage.take_output(0)
        forward.end(list(tensors_of(output)))
        seeds: list[Tensor | None] = [_like(t) if t.requires_grad else None for t in tensors_of(output)]
        following = map_tensors(_like, output)
        del output
        apart = {watch.number(t) for t in (*tensors_of(seeds), *tensors_of(following))}
        forward.keep(watch.alive() - apart)

        watch.follow(stage.runs[0, 0].outputs)
        numbers = _numbers(watch, seeds)
        stage.seed(0, seeds)
        del seeds
        backward = _Recording(watch)
        stage.backward_input(0, 0)
        gradients = stage.take_gradients(0)
        backward.end(gradients)
        del gradients
        backward.keep(watch.alive() - {watch.number(t) for t in tensors_of(following)})

        weights = _Recording(watch)
        stage.backward_weight(0, 0)
        weights.end([])
    resident = watch.alive()
    trace = Trace(
        tuple(inputs),
        numbers,
        forward.phase(resident),
        backward.phase(resident),
        weights.phase(resident).most,
        output_is_read,
    )
    return trace, following


def trace_loss(loss: LossLike, given: Value, targets: Value) -> Trace:
    """Trace the loss of an output like `given`. One that does not run on meta is taken to copy its input."""
    try:
        return _trace_loss(loss, given, targets)
    except Exception:
        return _copying(given)


def _trace_loss(loss: LossLike, given: Value, targets: Value) -> Trace:
    watch = Watch()
    end = LossEnd(_Followed(loss, watch))
    with watch.watching():
        output = map_tensors(_like, given)
        inputs = [watch.number(tensor) for tensor in tensors_of(output)]
        end.begin([targets], torch.ones((), dtype=torch.float64))
        forward = _Recording(watch)
        end.compute(0, output)
        forward.end([])
        del output
        forward.keep(watch.alive())
        backward = _Recording(watch)
        gradients = end.seed(0)
        backward.end(gradients)
        del gradients
    resident = watch.alive()
    return Trace(tuple(inputs), (), forward.phase(resident), backward.phase(resident))


def _copying(given: Value) -> Trace:
    """In float32 at least, as losses are computed."""
    tensors = list(tensors_of(given))
    count = len(tensors)
    copies = {
        count + place: tensor.numel() * max(4, tensor.element_size())
        for place, tensor in enumerate(tensors)
        if tensor.requires_grad
    }
    gradients = {2 * count + place: tensor.nbytes for place, tensor in enumerate(tensors) if tensor.requires_grad}
    flows = tuple(number if number in gradients else None for number in range(2 * count, 3 * count))
    forward = Phase(copies, (*range(count), *copies), (), sum(copies.values()))
    backward = Phase(gradients, (), flows, 2 * sum(gradients.values()))
    return Trace(tuple(range(count)), (), forward, backward)


class _Recording:
    """What is alive while a phase runs."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._start = watch.alive()
        self._first = len(watch.samples)
        self._held: Collection[int] = ()
        self._flows: tuple[int | None, ...] = ()

    def end(self, flows: Sequence[Tensor | None]) -> None:
        """The phase is over, and this flows on."""
        self._flows = _numbers(self._watch, flows)
        self._samples = [*self._watch.samples[self._first :], self._watch.alive()]

    def keep(self, held: Collection[int]) -> None:
        """This is kept for later."""
        self._held = held

    def phase(self, resident: Collection[int]) -> Phase:
        """The phase; what is `resident`, parameters say, was there before and stays."""

        def size(numbers: Collection[int]) -> int:
            return sum(sizes[number] for number in numbers if number not in resident)

        sizes = self._watch.sizes
        held = [number for number in sorted(self._held) if number not in resident]
        left = {*held, *(number for number in self._flows if number is not None)}
        made = {number: sizes[number] for number in left if number not in self._start}
        most = max(map(size, self._samples)) - size(self._start)
        return Phase(made, tuple(held), self._flows, most)


@dataclass(frozen=True)
class _Followed:
    """A loss whose backward is watched."""

    loss: LossLike
    watch: Watch

    def total(self, output: Any, targets: Any) -> Tensor:
        total = self.loss.total(output, targets)
        self.watch.follow([total])
        return total


def _like(tensor: Tensor) -> Tensor:
    return leaf_of(torch.empty_like(tensor, device="meta"), tensor.requires_grad)


def _numbers(watch: Watch, tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else watch.number(tensor) for tensor in tensors)
