"""The reduction of gradients: one all-reduce per unit and step, started as soon as the unit is final."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce
from plait.comm.handle import Handle
from plait.schedules.program import Finish, ReduceGradient
from plait.sharding.unit import FlatBuffer, Unit


class Reducer:
    """Sums the gradients of units over the ranks that hold them, buffer by buffer."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self._carried: list[tuple[FlatBuffer, Tensor]] = []
        self._under_way: list[Handle[Tensor]] = []

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What each instruction about units does."""
        return {ReduceGradient: lambda i: self.reduce(i.unit), Finish: lambda i: self.finish()}

    def begin(self) -> None:
        """Before a step: gradients become views again; those of earlier steps wait until this one is done."""
        self._carried = []
        for unit in self.units.values():
            for buffer in unit.buffers:
                buffer.refuse_refreezing()
        for unit in self.units.values():
            for buffer in unit.trainable:
                carried = buffer.attach_gradients()
                if carried is not None:
                    self._carried.append((buffer, carried))

    def reduce(self, name: str) -> None:
        """Start the sums of a unit's gradients."""
        for buffer in self.units[name].trainable:
            if buffer.group is not None:
                assert buffer.gradient is not None
                self._under_way.append(all_reduce(buffer.gradient, buffer.group, checked=False))

    def finish(self) -> None:
        """Wait for all reductions; gradients are then final and the same on every rank that holds them."""
        for handle in self._under_way:
            handle.wait()
        self._under_way = []
        with torch.no_grad():
            for buffer, carried in self._carried:
                assert buffer.gradient is not None
                buffer.gradient.add_(carried)
        self._carried = []

    def clear(self) -> None:
        """After an exception in the middle of a step: the gradients are again what they were before it."""
        carried = {id(buffer): gradient for buffer, gradient in self._carried}
        for unit in self.units.values():
            for buffer in unit.trainable:
                buffer.restore_gradients(carried.get(id(buffer)))
        self._under_way = []
        self._carried = []
