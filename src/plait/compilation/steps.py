"""Steps of a compiled layer: graphs, what runs between them, and what is left to the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from plait.compilation.torch_compiler import COMPILER_LOCK, Call, with_generated_code
from plait.compilation.weight_terms import WeightTerm

Values = list[Tensor]
"""By slot. A slot without a value, before it is computed and after its last use, holds nothing of use."""


class LayerCall(Protocol):
    """Protocol of one call of a layer: gives its steps the masks of dropouts, and queues weight gradients."""

    inputs: int
    """The number of arguments that are tensors of the input."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of a call of the dropout `name`, the same each time for a number."""

    def defer(self, term: WeightTerm, operands: Sequence[Tensor]) -> None:
        """Queue the computation of `term`, a part of a weight gradient, from `operands`."""


@dataclass
class GraphStep:
    """A graph of consecutive operations."""

    graph: GraphModule
    arguments: Sequence[int]
    results: Sequence[int]
    generates: bool
    """Whether code is generated, at the first run."""
    done: Sequence[int] = ()
    """Slots that no later step reads."""

    def __post_init__(self) -> None:
        self._call: Call | None = None if self.generates else self.graph.forward

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the graph."""
        arguments = [values[slot] for slot in self.arguments]
        run = self._call or self._generated(arguments)
        for slot, value in zip(self.results, run(*arguments), strict=True):
            values[slot] = value

    def _generated(self, arguments: Sequence[Tensor]) -> Call:
        with COMPILER_LOCK:
            if self._call is None:
                self._call = with_generated_code(self.graph, arguments)
            return self._call


@dataclass
class BetweenStep:
    """A collective between two graphs."""

    operation: Callable[[Tensor], Tensor]
    argument: int
    result: int
    copies: bool
    """Whether the operation writes to its argument, which others read, too."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the operation."""
        argument = values[self.argument]
        values[self.result] = self.operation(argument.clone() if self.copies else argument)


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
        call.defer(self.term, [values[slot] for slot in self.operands])


Step = DeferStep | GraphStep | BetweenStep | MaskStep


@dataclass(frozen=True)
class Steps:
    """Steps, and the slots of what they are given and return."""

    steps: Sequence[Step]
    slots: int
    results: Sequence[int | None]
    nothing: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, given: Iterable[Tensor], call: LayerCall) -> list[Tensor | None]:
        """Return the results of the steps for `given`; None where there is no result."""
        nothing = self.nothing
        values = [*given]
        values += [nothing] * (self.slots - len(values))
        for step in self.steps:
            step.run(values, call)
            for slot in step.done:
                values[slot] = nothing
        return [None if slot is None else values[slot] for slot in self.results]
