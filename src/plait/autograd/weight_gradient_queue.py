"""The queue of weight-gradient computations that a backward defers to a later `W` action of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from plait.autograd.regather import GatherRegistry

WeightWork = Callable[[], object]
"""Adds one weight gradient of one micro-batch to its buffer."""


@dataclass
class WeightGradientQueue:
    """The deferred weight gradients of a stage, in the order of the backward."""

    pending: list[WeightWork] = field(default_factory=list)
    overlaps: bool = False
    """Whether `overlap` runs the queue: set where the weight gradients of a backward follow at once."""
    defers: bool = True
    """Whether `add` appends to the queue; else it computes at once."""
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a weight, the buffer of its gradient while its `.grad` is set aside."""
    gathered: GatherRegistry = field(default_factory=GatherRegistry)
    """The linears' inputs and output gradients that are gathered again for their weight gradients."""

    def add(self, work: WeightWork) -> None:
        """Append the computation of one weight gradient to the queue; unless `defers`, compute it at once."""
        if self.defers:
            self.pending.append(work)
        else:
            work()

    def buffer_of(self, weight: Tensor) -> Tensor:
        """Return the buffer to which gradients of `weight` are added: by default its `.grad`."""
        buffer = self.buffers.get(id(weight), weight.grad)
        assert buffer is not None, "a gradient buffer is set before a backward"
        return buffer

    def take(self) -> list[WeightWork]:
        """Empty the queue and return its entries."""
        taken, self.pending = self.pending, []
        return taken

    def run(self) -> None:
        """Empty the queue and compute its weight gradients."""
        for work in self.take():
            work()

    def overlap(self) -> None:
        """Compute the queued weight gradients during a collective; do nothing unless `overlaps`."""
        if self.overlaps:
            self.run()
