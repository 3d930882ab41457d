"""Steps of a compiled layer that compute attention eagerly, between two graphs, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.engine.compilation.slots import LayerCall, Results, Values, taken
from plait.tensor.autograd.between_graphs import RecordedAttention
from plait.tensor.autograd.engine_calls import run_backward


@dataclass
class AttentionRun:
    """Attention's output with its autograd graph, and where its backward puts gradients."""

    output: Tensor
    gradients: list[Tensor | None]
    """Of the query, the keys and the values, once the backward has run."""


@dataclass
class AttentionStep:
    """A step that computes attention eagerly, and keeps its autograd graph if a backward reads it."""

    recorded: RecordedAttention
    arguments: Sequence[int]
    """The query, the keys and the values."""
    output: Results
    saved: Sequence[int]
    """Slots for an `AttentionRun`; none where no backward reads it."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Compute attention of the step's arguments in `values`, and store the output there."""
        query, key, value = taken(values, self.arguments, self.done)
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
    """A step that computes the gradients of the query, keys and values of an `AttentionStep`."""

    gradient: int
    attention: int
    """The slot of the `AttentionRun`."""
    results: Sequence[Results]
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the backward of the attention's autograd graph, and store the gradients."""
        gradient, run = taken(values, (self.gradient, self.attention), self.done)
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
