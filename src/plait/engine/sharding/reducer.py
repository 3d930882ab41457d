"""The reduction of gradients: once per unit and step or micro-batch, as soon as the gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.engine.sharding.flat_buffer import FlatBuffer, allocate_storage
from plait.engine.sharding.unit import Unit
from plait.ranks.accelerator import moved_later, read_later
from plait.ranks.collectives import all_reduce, reduce_scatter
from plait.ranks.handle import Handle
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    ReduceGradient,
    ScatterGradient,
)
from plait.tensor.autograd.private_torch_functions import zero_each
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue


class Reducer:
    """Reduces gradients between the ranks that hold the same parameters, unit by unit, buffer by buffer.

    begin             backwards add to whole gradients; where these are not kept, from `open` to `scatter`
    scatter, collect  where a unit is sharded: they are summed, and each rank adds its part to its shard's
    reduce            gradients, or those of shards, are summed over the other ranks that hold the same
    finish, clear     the step has ended, or failed
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        queue: WeightGradientQueue | None = None,
        *,
        writes_first: bool = True,
    ) -> None:
        """`writes_first`: `queue` writes a step's first gradient of its `products`; else it adds to zero."""
        self.units, self._queue = units, queue or WeightGradientQueue()
        self._products: Collection[int] = self._queue.products if writes_first else ()
        self.scale = 1.0
        """The factor of this step's loss, by which the reduced gradients are divided."""
        self._parts: dict[str, tuple[dict[int, Tensor], list[Tensor]]] = {}
        """Of the units that have begun once: see `_parts_of`."""
        self._attached: list[tuple[FlatBuffer, Tensor | None]] = []
        """The buffers of the current step, with their gradients of earlier steps."""
        self._scattered: dict[str, list[tuple[FlatBuffer, Handle[Tensor]]]] = {}
        self._arriving: tuple[Tensor, Callable[[], Tensor]] | None = None
        """The last offloaded gradient that is being copied from the GPU, and its sum on the CPU."""
        self._reduced: list[tuple[FlatBuffer, Handle[Tensor]]] = []
        self.observer: Callable[[FlatBuffer], None] | None = None
        """Called with each buffer to whose shard's gradient a reduce-scatter was added."""
        self._stale: list[tuple[FlatBuffer, Handle[Tensor]]] = []
        """Reductions of a failed step, whose input a backend may still read."""

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return a dict from instruction type (allocate, scatter, reduce, …) to the method that runs it."""
        return {
            AllocateGradient: lambda i: self.open(i.unit),
            ScatterGradient: lambda i: self.scatter(i.unit),
            AwaitScatter: lambda i: self.collect(i.unit),
            ReduceGradient: lambda i: self.reduce(i.unit),
            Finish: lambda i: self.finish(),
        }

    @property
    def starts_anew(self) -> bool:
        """Whether the next step's gradients start at zero: parameters train and no `.grad` is set."""
        trains = False
        for unit in self.units.values():
            for shard in unit.shard_parameters.values():
                if shard.grad is not None:
                    return False
                trains = trains or shard.requires_grad
        return trains

    def drop(self) -> None:
        """Set all `.grad` to None, so that optimizers skip the parameters."""
        for unit in self.units.values():
            for shard in unit.shard_parameters.values():
                shard.grad = None

    def begin(self, scale: float = 1.0) -> None:
        """Begin a step whose loss is multiplied by `scale`: set each `.grad` to a view of its buffer.

        Buffers are set to zero; of a weight that the queue writes first, only where nothing has written it.
        Gradients of earlier steps are set aside and added in `finish`.
        """
        self.scale = scale
        for buffer, handle in self._stale:
            handle.wait()
            buffer.release_gradients()
        self._stale = []
        for unit in self.units.values():
            for buffer in unit.buffers:
                buffer.check_settings()
        added_to: list[Tensor] = []
        for name, unit in self.units.items():
            for buffer in unit.trainable:
                self._attached.append((buffer, buffer.attach_gradients()))
                if buffer.adds_to_shard and buffer.shard_gradient is not None:
                    added_to.append(buffer.shard_gradient)
            if unit.keeps_gradients:
                added_to += self._started(name)
        zero_each(added_to)

    def open(self, name: str) -> None:
        """Allocate the whole gradient of the unit `name`; zeros where a step adds to it first."""
        for buffer in self.units[name].trainable:
            for gradient in buffer.whole_gradients:
                allocate_storage(gradient)
        zero_each(self._started(name))

    def _started(self, name: str) -> list[Tensor]:
        """Note that a step's gradients of a unit begin; return the parts of them that must be set to zero."""
        if name not in self._parts:  # now, since there are no views of storage that is not allocated
            self._parts[name] = _parts_of(self.units[name], self._products)
        first, rest = self._parts[name]
        self._queue.unwritten.update(first)
        return rest

    def _complete(self, name: str) -> None:
        """Set a unit's gradients to zero where nothing was added in this step; call before they are read."""
        unwritten = self._queue.unwritten
        if unwritten and name in self._parts:
            first, _ = self._parts[name]
            zero_each([gradient for key, gradient in first.items() if key in unwritten])
            unwritten.difference_update(first)

    def scatter(self, name: str) -> None:
        """Start the reduce-scatter of the whole gradient of a unit over the axes of its shards."""
        self._complete(name)
        self._scattered[name] = []
        for buffer in self.units[name].trainable:
            buffer.add_up_stages()
            self._scattered[name].append((buffer, _scatter(buffer).about(_gradient_of(name))))

    def collect(self, name: str) -> None:
        """Wait for a unit's reduce-scatter, and add its result to the gradients of this rank's shards."""
        for buffer, handle in self._scattered.pop(name):
            assert buffer.shard_gradient is not None
            summed = handle.wait()
            if buffer.offloads_gradients:
                self._add_arrived()
                self._arriving = buffer.shard_gradient, read_later(summed)
            elif buffer.has_shard_gradient:
                buffer.shard_gradient.add_(summed)
            elif summed is not buffer.shard_gradient:
                buffer.shard_gradient.copy_(summed)
            buffer.release_gradients()
            if self.observer is not None and not buffer.offloads_gradients:
                self.observer(buffer)

    def _add_arrived(self) -> None:
        """Wait for the last gradient's copy to the CPU, and add it to the gradient of its shard."""
        if self._arriving is not None:
            shard_gradient, read = self._arriving
            self._arriving = None
            shard_gradient.add_(read())

    def reduce(self, name: str) -> None:
        """Start the all-reduce of a unit's gradients (its shards, if sharded) over the replica group."""
        self._complete(name)
        for buffer in self.units[name].trainable:
            if buffer.shard_group is None:  # else `scatter` has added them up
                buffer.add_up_stages()
            if buffer.replica_group is not None and buffer.replica_group.size > 1:
                self._add_arrived()
                self._reduced.append((buffer, _reduce(buffer).about(_gradient_of(name))))

    def finish(self) -> None:
        """Wait for all reductions; gradients are then final, and equal on all ranks that hold them.

        Without `begin`, as in a program without a backward, nothing changes.
        """
        self._add_arrived()
        for name in self.units if self._queue.unwritten else ():
            self._complete(name)
        for buffer, handle in self._reduced:
            summed, target = handle.wait(), _accumulated(buffer)
            if summed.data_ptr() != target.data_ptr():
                target.copy_(summed)
        self._reduced = []
        with torch.no_grad():
            for buffer, carried in self._attached:
                buffer.finish_gradients(carried, self.scale)
        self._attached = []

    def clear(self) -> None:
        """Clean up after an exception within a step: restore the gradients from before the step."""
        self._queue.unwritten.clear()
        self.observer = None
        started = [*self._reduced, *(pair for pairs in self._scattered.values() for pair in pairs)]
        self._stale += [(buffer, handle) for buffer, handle in started if not handle.abandon()]
        still_read = [buffer for buffer, _ in self._stale]
        for buffer, carried in self._attached:
            buffer.restore_gradients(carried)
            if buffer not in still_read:
                buffer.release_gradients()
        self._scattered.clear()
        self._arriving = None
        self._reduced = []
        self._attached = []


def _parts_of(unit: Unit, products: Collection[int]) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return a unit's gradients that are written, not added to, by parameter `id`; and all others.

    And the rest of its whole gradients, which start at zero.
    """
    first: dict[int, Tensor] = {}
    rest: list[Tensor] = []
    for view in (view for buffer in unit.trainable for view in buffer.stage_views):
        names = [name for name, parameter in view.parameters.items() if id(parameter) in products]
        first |= {id(view.parameters[name]): view.gradients[name] for name in names}
        rest += view.gradient_without(names)
    return first, rest


def _gradient_of(unit: str) -> str:
    return f"gradient of {unit or 'the model'}"


def _scatter(buffer: FlatBuffer) -> Handle[Tensor]:
    """Start the reduce-scatter of a buffer's whole gradient; in place if `spec.scatters_in_place`."""
    assert buffer.shard_group is not None
    assert buffer.gradient is not None
    out = buffer.shard_gradient if buffer.spec.scatters_in_place else None
    return reduce_scatter(buffer.gradient.to(buffer.reduce_dtype), buffer.shard_group, out=out, checked=False)


def _reduce(buffer: FlatBuffer) -> Handle[Tensor]:
    """Start the all-reduce of a buffer's gradient over the replica group; in place where possible."""
    assert buffer.replica_group is not None
    assert buffer.gradient is not None
    # An offloaded gradient is in pinned memory, and is next written when this all-reduce has ended.
    reduced = moved_later(_accumulated(buffer).to(buffer.reduce_dtype), buffer.gradient.device)
    return all_reduce(reduced, buffer.replica_group, checked=False)


def _accumulated(buffer: FlatBuffer) -> Tensor:
    """Return the gradient that is all-reduced over the replica group: the shard's, if sharded."""
    gradient = buffer.shard_gradient if buffer.spec.kind.sharded else buffer.gradient
    assert gradient is not None
    return gradient
