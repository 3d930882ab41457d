"""Calls of a compiled layer: graphs, what runs eagerly between them, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.engine.compilation.torch_compiler import GraphCall
from plait.engine.compilation.weight_terms import WeightTerms
from plait.tensor.autograd.between_graphs import RecordedAttention
from plait.tensor.autograd.regather import Gather, Regathered
from plait.tensor.autograd.torch_calls import run_backward
from plait.tensor.running_sequence import running_sequence

Values = list[Any]
"""By slot a tensor, `Regathered` or `AttentionRun`; None before it is computed, and after its last use."""


class LayerCall(Protocol):
    """Protocol of one call of a layer: gives its steps its dropouts, and queues weight gradients."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of call `number` of the dropout `name`; asked again, the same mask."""

    def dropout(self, name: str) -> nn.Module:
        """Return the layer's dropout module `name`."""

    def regathered(self, part: Tensor, gather: Gather) -> Regathered:
        """Return a tensor whose all-gather from the ranks' parts is repeated on first use."""

    def defer(self, terms: WeightTerms, operands: Sequence[Tensor | Regathered]) -> None:
        """Queue the computation of `terms`, parts of weight gradients, from `operands`."""


@dataclass(frozen=True)
class Results:
    """The slots that store one result of a step, and the strides that later graphs expect of it."""

    slots: Sequence[int]
    stride: tuple[int, ...]

    def store(self, values: Values, tensor: Tensor) -> None:
        """Store `tensor`, or a copy with the strides of the trace."""
        if self.slots:
            made = tensor if tensor.stride() == self.stride else with_strides(tensor, self.stride)
            for slot in self.slots:
                values[slot] = made


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `tensor` with the strides `stride`."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


@dataclass
class AttentionRun:
    """Attention's output with its autograd graph, and where its backward puts gradients."""

    output: Tensor
    gradients: list[Tensor | None]
    """Of the query, the keys and the values, once the backward has run."""


@dataclass
class AttentionOperation:
    """A step that computes attention eagerly, and keeps its autograd graph if a backward reads it."""

    recorded: RecordedAttention
    arguments: Sequence[int]
    """The query, the keys and the values."""
    output: Results
    saved: Sequence[int]
    """Slots for an `AttentionRun`; none where no backward reads it."""
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Compute attention of the values `given`, and store the output in `values`."""
        query, key, value = given
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
    """A step that computes the gradients of the query, keys and values of an `AttentionOperation`."""

    arguments: Sequence[int]
    """The gradient of the output, and the `AttentionRun`."""
    results: Sequence[Results]
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Run the backward of the attention's autograd graph, and store the gradients."""
        gradient, run = given
        run_backward([run.output], [gradient])
        for gradient, result in zip(run.gradients, self.results, strict=True):
            result.store(values, gradient)


class _Given(torch.autograd.Function):
    """Autograd function that returns views of tensors, and appends their gradients to a list in its backward.

    Leaves with `.grad` would stay in memory until then, also those that attention does not save.
    """

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


@dataclass
class GraphOperation:
    """A step that runs a graph of consecutive operations."""

    graph: GraphCall
    arguments: Sequence[int]
    results: Sequence[int]
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Run the graph on `given`, and store its results in `values`."""
        made = self.graph(given)
        for slot, value in zip(self.results, made, strict=True):
            values[slot] = value


@dataclass
class CollectiveOperation:
    """A step that runs a collective between two graphs."""

    operation: Callable[[Tensor], Tensor]
    arguments: Sequence[int]
    """One."""
    result: Results
    copies: bool
    """Whether the operation writes to its argument, which others read, too."""
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Run the collective on the value `given`, and store its result in `values`."""
        (argument,) = given
        self.result.store(values, self.operation(argument.clone() if self.copies else argument))


@dataclass
class RegatherOperation:
    """A step that prepares to repeat an all-gather of the forward, for a weight gradient."""

    gather: Gather
    arguments: Sequence[int]
    """The part."""
    result: int
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Store the `Regathered`; its all-gather starts now only if the weight gradients follow at once."""
        (part,) = given
        values[self.result] = call.regathered(part, self.gather)


@dataclass
class MaskOperation:
    """A step that computes the mask of a dropout, before the first graph."""

    number: int
    name: str
    """Of the dropout."""
    shape: Sequence[int]
    device: torch.device
    result: int
    arguments: Sequence[int] = ()
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Compute the dropout's mask for this call, and store it in `values`."""
        values[self.result] = call.mask(self.number, self.name, self.shape, self.device)


@dataclass
class PositionsOperation:
    """A step that stores the positions of the running sequence, before the first graph."""

    device: torch.device
    result: int
    arguments: Sequence[int] = ()
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Store the positions of the running sequence in `values`."""
        sequence = running_sequence()
        assert sequence is not None
        values[self.result] = sequence.positions(self.device)


@dataclass
class DeferOperation:
    """A step that queues summands of weight gradients, once their operands are computed."""

    terms: WeightTerms
    arguments: Sequence[int]
    """The operands, each once."""
    done: Sequence[int] = ()

    def run(self, given: list[Any], values: Values, call: LayerCall) -> None:
        """Queue the computation of the summands from their operands."""
        call.defer(self.terms, given)


Between = CollectiveOperation | RegatherOperation | AttentionOperation | AttentionBackwardStep
Step = GraphOperation | Between | MaskOperation | PositionsOperation | DeferOperation


@dataclass(frozen=True)
class LayerOperations:
    """A sequence of steps, and the slots of its arguments and results.

    Each step has slots `arguments`, and is given their values; `done` are those that no later step reads,
    whose references are dropped, so that graphs free them.
    """

    steps: Sequence[Step]
    slots: int
    results: Sequence[int]
    """A slot beyond the last: no result."""

    def run(self, values: Values, call: LayerCall) -> list[Any]:
        """Return the results of the steps for `values`, which it empties; None where there is no result."""
        values += [None] * (self.slots + 1 - len(values))
        for step in self.steps:
            taken = list(map(values.__getitem__, step.arguments))
            for slot in step.done:
                values[slot] = None
            step.run(taken, values, call)
        return list(map(values.__getitem__, self.results))
