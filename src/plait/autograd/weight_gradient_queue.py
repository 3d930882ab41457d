"""The queue of weight-gradient computations that a backward defers to a later `W` action of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    products: set[int] = field(default_factory=set)
    """The ids of the weights whose gradients are matrix products, of which a step's first may be written."""
    unwritten: set[int] = field(default_factory=set)
    """Those of them whose buffers hold nothing of this step yet, nor zeros."""
    gathered: GatherRegistry = field(default_factory=GatherRegistry)
    """The linears' inputs and output gradients that are gathered again for their weight gradients."""

    def add(self, work: WeightWork) -> None:
        """Append the computation of one weight gradient to the queue; unless `defers`, compute it at once."""
        if self.defers:
            self.pending.append(work)
        else:
            work()

    def buffer_of(self, weight: Tensor) -> Tensor:
        """Return the buffer to which gradients of `weight` are added: by default its `.grad`.

        If nothing was added to it in this step, it is set to zero.
        """
        buffer = self.buffers.get(id(weight), weight.grad)
        assert buffer is not None, "a gradient buffer is set before a backward"
        if self.unwritten and id(weight) in self.unwritten:
            self.unwritten.discard(id(weight))
            buffer.zero_()
        return buffer

    def begins(self, weights: Sequence[Tensor]) -> bool:
        """Return whether gradients of `weights` hold nothing of this step; the caller must overwrite them.

        If something was added to some of them, the others are set to zero.
        """
        keys = set(map(id, weights))
        if keys <= self.unwritten:
            self.unwritten -= keys
            return True
        self.set_to_zero(weights)
        return False

    def set_to_zero(self, parameters: Iterable[Tensor]) -> None:
        """Set the gradients of `parameters` to zero where nothing was added to them in this step."""
        for parameter in parameters:
            if id(parameter) in self.unwritten:
                self.buffer_of(parameter)

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
