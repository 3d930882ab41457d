"""The reduction of gradients: once per unit and step, or once per micro-batch, as soon as it is final."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce, reduce_scatter
from plait.comm.handle import Handle
from plait.schedules.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    ReduceGradient,
    ScatterGradient,
)
from plait.sharding.flat_buffer import FlatBuffer, allocate_storage, free_storage
from plait.sharding.unit import Unit


class Reducer:
    """Sums the gradients of units over the ranks that hold them, buffer by buffer."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self.scale = 1.0
        """What this step's gradients are multiplied by until they are final."""
        self._attached: list[tuple[FlatBuffer, Tensor | None]] = []
        """The buffers of the step under way, with what their gradients were before it."""
        self._scattered: dict[str, list[tuple[FlatBuffer, Handle[Tensor]]]] = {}
        self._reduced: list[tuple[FlatBuffer, Handle[Tensor]]] = []
        self._stale: list[tuple[FlatBuffer, Handle[Tensor]]] = []
        """Of a step that failed: what a backend may still be reading."""

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What each instruction about units does."""
        return {
            AllocateGradient: lambda i: self.open(i.unit),
            ScatterGradient: lambda i: self.scatter(i.unit),
            AwaitScatter: lambda i: self.collect(i.unit),
            ReduceGradient: lambda i: self.reduce(i.unit),
            Finish: lambda i: self.finish(),
        }

    @property
    def starts_anew(self) -> bool:
        """Whether no piece has a gradient to which the next step adds; where none trains nobody can tell."""
        pieces = [piece for unit in self.units.values() for piece in unit.pieces.values()]
        trains = any(piece.requires_grad for piece in pieces)
        return trains and all(piece.grad is None for piece in pieces)

    def drop(self) -> None:
        """Throw all gradients away: optimizers leave alone what has none."""
        for unit in self.units.values():
            for piece in unit.pieces.values():
                piece.grad = None

    def begin(self, scale: float = 1.0) -> None:
        """Before a step: gradients become views again; those of earlier steps wait until this one is done.

        Those of this step will be multiplied by `scale`.
        """
        self.scale = scale
        for buffer, handle in self._stale:
            handle.wait()
            _release(buffer)
        self._stale = []
        for unit in self.units.values():
            for buffer in unit.buffers:
                buffer.refuse_refreezing()
        for unit in self.units.values():
            for buffer in unit.trainable:
                self._attached.append((buffer, buffer.attach_gradients()))

    def open(self, name: str) -> None:
        """Make a unit's whole gradient, of zeros."""
        for buffer in self.units[name].trainable:
            for gradient in buffer.whole_gradients:
                allocate_storage(gradient)
                gradient.zero_()

    def scatter(self, name: str) -> None:
        """Start the sums over `shard` of a unit's whole gradient."""
        self._scattered[name] = []
        for buffer in self.units[name].trainable:
            buffer.add_up_stages()
            self._scattered[name].append((buffer, _scatter(buffer).about(_gradient_of(name))))

    def collect(self, name: str) -> None:
        """Add this rank's pieces of these sums to what it has, and let go of what is not kept."""
        for buffer, handle in self._scattered.pop(name):
            assert buffer.piece_gradient is not None
            summed = handle.wait()
            if not buffer.reduces_in_place:
                home = buffer.piece_gradient.device
                # The CPU would add what is still on its way to it.
                buffer.piece_gradient.add_(summed.to(home, non_blocking=home.type != "cpu"))
            elif summed is not buffer.piece_gradient:
                buffer.piece_gradient.copy_(summed)
            _release(buffer)

    def reduce(self, name: str) -> None:
        """Start the other sums of a unit's gradients: what is left to add is on other ranks."""
        for buffer in self.units[name].trainable:
            if buffer.shard is None:  # else `scatter` has added them up
                buffer.add_up_stages()
            if buffer.group is not None and buffer.group.size > 1:
                self._reduced.append((buffer, _reduce(buffer).about(_gradient_of(name))))

    def finish(self) -> None:
        """Wait for all reductions; gradients are then final and the same on every rank that holds them.

        After a program without a backward, which did not `begin`, nothing has changed.
        """
        for buffer, handle in self._reduced:
            summed, target = handle.wait(), _sum_so_far(buffer)
            if summed.data_ptr() != target.data_ptr():
                target.copy_(summed)
        self._reduced = []
        with torch.no_grad():
            for buffer, carried in self._attached:
                buffer.finish_gradients(carried, self.scale)
        self._attached = []

    def clear(self) -> None:
        """After an exception in the middle of a step: the gradients are again what they were before it."""
        started = [*self._reduced, *(pair for pairs in self._scattered.values() for pair in pairs)]
        self._stale += [(buffer, handle) for buffer, handle in started if not handle.abandon()]
        still_read = [buffer for buffer, _ in self._stale]
        for buffer, carried in self._attached:
            buffer.restore_gradients(carried)
            if buffer not in still_read:
                _release(buffer)
        self._scattered.clear()
        self._reduced = []
        self._attached = []


def _gradient_of(unit: str) -> str:
    return f"gradient of {unit or 'the model'}"


def _release(buffer: FlatBuffer) -> None:
    if not buffer.keeps_gradient:
        for gradient in buffer.whole_gradients:
            free_storage(gradient)


def _scatter(buffer: FlatBuffer) -> Handle[Tensor]:
    """Start the sum of a whole gradient over `shard`; in place where this rank's piece is a part of it."""
    kind, gradient, piece = buffer.kind, buffer.gradient, buffer.piece_gradient
    assert buffer.shard is not None
    assert gradient is not None
    assert piece is not None
    if kind.reduce != kind.gradient:
        return reduce_scatter(gradient.to(kind.reduce), buffer.shard, checked=False)
    out = piece if buffer.reduces_in_place else None
    return reduce_scatter(gradient, buffer.shard, out=out, checked=False)


def _reduce(buffer: FlatBuffer) -> Handle[Tensor]:
    """Start the sum over the ranks that hold the same; in place unless it travels in another dtype."""
    assert buffer.group is not None
    assert buffer.gradient is not None
    travels = _sum_so_far(buffer).to(buffer.gradient.device, buffer.kind.reduce)
    return all_reduce(travels, buffer.group, checked=False)


def _sum_so_far(buffer: FlatBuffer) -> Tensor:
    """The gradient that is summed over the ranks that hold the same: a piece where it is cut."""
    gradient = buffer.piece_gradient if buffer.kind.cut else buffer.gradient
    assert gradient is not None
    return gradient
