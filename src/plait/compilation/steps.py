"""Steps of a compiled layer: graphs, what runs between them, and what is left to the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.autograd.regather import Gather
from plait.autograd.running_sequence import running_sequence
from plait.compilation.attention_steps import AttentionBackwardStep, AttentionStep
from plait.compilation.slots import LayerCall, Results, Values, taken
from plait.compilation.torch_compiler import GraphCall
from plait.compilation.weight_terms import WeightTerm


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
        made = self.graph(taken(values, self.arguments, self.done))
        for slot, value in zip(self.results, made, strict=True):
            values[slot] = value


@dataclass
class BetweenStep:
    """A collective between two graphs."""

    operation: Callable[[Tensor], Tensor]
    argument: int
    result: Results
    copies: bool
    """Whether the operation writes to its argument, which others read, too."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the operation."""
        (argument,) = taken(values, (self.argument,), self.done)
        self.result.store(values, self.operation(argument.clone() if self.copies else argument))


@dataclass
class RegatherStep:
    """A step that prepares to repeat an all-gather of the forward, for a weight gradient."""

    gather: Gather
    argument: int
    result: int
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Store the `Regathered`; its all-gather starts now only if the weight gradients follow at once."""
        (piece,) = taken(values, (self.argument,), self.done)
        values[self.result] = call.regathered(piece, self.gather)


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
class PositionsStep:
    """The positions of the running sequence, before the first graph."""

    device: torch.device
    result: int
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Store the positions."""
        sequence = running_sequence()
        assert sequence is not None
        values[self.result] = sequence.positions(self.device)


@dataclass
class DeferStep:
    """A summand of a weight gradient, whose operands are there."""

    term: WeightTerm
    operands: Sequence[int]
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Queue the summand."""
        call.defer(self.term, taken(values, self.operands, self.done))


Between = BetweenStep | RegatherStep | AttentionStep | AttentionBackwardStep
Step = GraphStep | Between | MaskStep | PositionsStep | DeferStep


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
