"""Steps of a compiled layer: graphs, operations between graphs, and weight gradients for the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.engine.compilation.attention_steps import AttentionBackwardStep, AttentionStep
from plait.engine.compilation.slots import LayerCall, Results, Values, taken
from plait.engine.compilation.torch_compiler import GraphCall
from plait.engine.compilation.weight_terms import WeightTerm
from plait.tensor.autograd.regather import Gather
from plait.tensor.running_sequence import running_sequence


@dataclass
class GraphStep:
    """A step that runs a graph of consecutive operations."""

    graph: GraphCall
    arguments: Sequence[int]
    results: Sequence[int]
    done: Sequence[int] = ()
    """Slots that no later step reads."""

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the graph on the step's arguments in `values`, and store its results there."""
        made = self.graph(taken(values, self.arguments, self.done))
        for slot, value in zip(self.results, made, strict=True):
            values[slot] = value


@dataclass
class BetweenStep:
    """A step that runs a collective between two graphs."""

    operation: Callable[[Tensor], Tensor]
    argument: int
    result: Results
    copies: bool
    """Whether the operation writes to its argument, which others read, too."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the collective on the step's argument in `values`, and store its result there."""
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
    """A step that computes the mask of a dropout, before the first graph."""

    number: int
    name: str
    """Of the dropout."""
    shape: Sequence[int]
    device: torch.device
    result: int
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Compute the dropout's mask for this call, and store it in `values`."""
        values[self.result] = call.mask(self.number, self.name, self.shape, self.device)


@dataclass
class PositionsStep:
    """A step that stores the positions of the running sequence, before the first graph."""

    device: torch.device
    result: int
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Store the positions of the running sequence in `values`."""
        sequence = running_sequence()
        assert sequence is not None
        values[self.result] = sequence.positions(self.device)


@dataclass
class DeferStep:
    """A step that queues a summand of a weight gradient, once its operands are computed."""

    term: WeightTerm
    operands: Sequence[int]
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Queue the computation of the summand from its operands in `values`."""
        call.defer(self.term, taken(values, self.operands, self.done))


Between = BetweenStep | RegatherStep | AttentionStep | AttentionBackwardStep
Step = GraphStep | Between | MaskStep | PositionsStep | DeferStep


@dataclass(frozen=True)
class Steps:
    """A sequence of steps, and the slots of its arguments and results."""

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
