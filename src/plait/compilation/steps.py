"""Steps of a compiled layer: graphs, what runs between them, and what is left to the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.autograd.engine_calls import run_backward
from plait.autograd.layer_trace import RecordedAttention
from plait.autograd.running_sequence import running_sequence
from plait.compilation.torch_compiler import GraphCall
from plait.compilation.weight_terms import WeightTerm

Values = list[Any]
"""Tensors and `AttentionRun`s by slot; None before a value is computed, and after its last use."""


class LayerCall(Protocol):
    """Protocol of one call of a layer: gives its steps its dropouts, and queues weight gradients."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of a call of the dropout `name`, the same each time for a number."""

    def dropout(self, name: str) -> nn.Module:
        """Return the layer's dropout `name`."""

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
class AttentionRun:
    """Attention's output with its autograd graph, and where its backward puts gradients."""

    output: Tensor
    gradients: list[Tensor | None]
    """Of the query, the keys and the values, once the backward has run."""


@dataclass
class AttentionStep:
    """Attention on a part of a sequence or on documents, between two graphs."""

    recorded: RecordedAttention
    arguments: Sequence[int]
    """The query, the keys and the values."""
    output: Results
    saved: Sequence[int]
    """Slots for an `AttentionRun`; none where no backward reads it."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Compute attention."""
        query, key, value = _taken(values, self.arguments, self.done)
        name = self.recorded.dropout
        dropout = None if name is None else call.dropout(name)
        if not self.saved:
            self.output.store(values, self.recorded.attention(query, key, value, dropout))
            return
        gradients: list[Tensor | None] = []
        with torch.enable_grad():
            anchor = query.new_empty(0).requires_grad_()
            arguments = anchor, gradients, self.recorded.learns, query, key, value
            query, key, value = _Given.apply(*arguments)  # type: ignore[no-untyped-call]
            output = self.recorded.attention(query, key, value, dropout)
        self.output.store(values, output.detach())
        for slot in self.saved:
            values[slot] = AttentionRun(output, gradients)


@dataclass
class AttentionBackwardStep:
    """The backward of an `AttentionStep`: gradients of its query, keys and values."""

    gradient: int
    attention: int
    """The slot of the `AttentionRun`."""
    results: Sequence[Results]
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Compute the gradients."""
        gradient, run = _taken(values, (self.gradient, self.attention), self.done)
        run_backward([run.output], [gradient])
        for gradient, result in zip(run.gradients, self.results, strict=True):
            result.store(values, gradient)


class _Given(torch.autograd.Function):
    """Tensors of which autograd holds no more than what saves them: leaves would hold their memory."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, gradients: list[Tensor | None], learns: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        given = tuple(one.view_as(one) for one in tensors)
        ctx.mark_non_differentiable(*(one for one, learn in zip(given, learns, strict=True) if not learn))
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients += gradients
        return (None,) * (3 + len(gradients))


@dataclass(frozen=True)
class Results:
    """The slots of one result of a step, and its strides, for which later graphs are made."""

    slots: Sequence[int]
    stride: tuple[int, ...]

    def store(self, values: Values, tensor: Tensor) -> None:
        """Store `tensor`, or a copy with the strides of the trace."""
        if self.slots:
            made = tensor if tensor.stride() == self.stride else with_strides(tensor, self.stride)
            for slot in self.slots:
                values[slot] = made


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


def _taken(values: Values, slots: Sequence[int], done: Sequence[int]) -> list[Any]:
    """Return the values of `slots`, and let go of those of `done`, so that a graph can free them early."""
    taken = list(map(values.__getitem__, slots))
    for slot in done:
        values[slot] = None
    return taken


Step = DeferStep | GraphStep | BetweenStep | MaskStep | PositionsStep | AttentionStep | AttentionBackwardStep


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
