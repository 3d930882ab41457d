"""Steps of a compiled layer: graphs, what runs between them, and what is left to the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.compilation.torch_compiler import GraphCall
from plait.compilation.weight_terms import WeightTerm

Values = list[Any]
"""Tensors by slot. A slot without a value, before it is computed and after its last use, holds None."""


class LayerCall(Protocol):
    """Protocol of one call of a layer: gives its steps the masks of dropouts, and queues weight gradients."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of a call of the dropout `name`, the same each time for a number."""

    def defer(self, term: WeightTerm, operands: Sequence[Tensor]) -> None:
        """Queue the computation of `term`, a part of a weight gradient, from `operands`."""


@dataclass
class GraphStep:
    """A graph of consecutive operations."""

    graph: GraphCall
    arguments: Sequence[int]
    results: Sequence[int]
    done: Sequence[int] = ()
    """Slots that no later step reads."""

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the graph."""
        made = self.graph(_taken(values, self.arguments, self.done))
        for slot, value in zip(self.results, made, strict=True):
            values[slot] = value


@dataclass
class BetweenStep:
    """A collective between two graphs."""

    operation: Callable[[Tensor], Tensor]
    argument: int
    result: int
    copies: bool
    """Whether the operation writes to its argument, which others read, too."""
    stride: tuple[int, ...]
    """Of the result, for which later graphs are made."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the operation."""
        (argument,) = _taken(values, (self.argument,), self.done)
        made = self.operation(argument.clone() if self.copies else argument)
        values[self.result] = made if made.stride() == self.stride else with_strides(made, self.stride)


@dataclass
class MaskStep:
    """The mask of a dropout, made before the first graph."""

    number: int
    name: str
    """Of the dropout."""
    shape: Sequence[int]
    device: torch.device
    result: int
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Make the mask."""
        values[self.result] = call.mask(self.number, self.name, self.shape, self.device)


@dataclass
class DeferStep:
    """A summand of a weight gradient, whose operands are there."""

    term: WeightTerm
    operands: Sequence[int]
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Queue the summand."""
        call.defer(self.term, _taken(values, self.operands, self.done))


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `tensor` with the strides `stride`."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _taken(values: Values, slots: Sequence[int], done: Sequence[int]) -> list[Tensor]:
    """Return the values of `slots`, and let go of those of `done`, so that a graph can free them early."""
    taken = list(map(values.__getitem__, slots))
    for slot in done:
        values[slot] = None
    return taken


Step = DeferStep | GraphStep | BetweenStep | MaskStep


@dataclass(frozen=True)
class Steps:
    """Steps, and the slots of what they are given and return."""

    steps: Sequence[Step]
    slots: int
    results: Sequence[int]
    """A slot beyond the last: no result."""

    def run(self, given: Values, call: LayerCall) -> list[Any]:
        """Return the results of the steps for `given`, which it empties; None where there is no result."""
        given += [None] * (self.slots + 1 - len(given))
        for step in self.steps:
            step.run(given, call)
        return list(map(given.__getitem__, self.results))
