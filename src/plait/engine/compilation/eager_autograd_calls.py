"""Calls of a compiled layer that run eagerly between its graphs, with a backward by autograd.

The forward keeps autograd's graph of the call, for an operation of the backward. Where the layer is
recomputed, the forward keeps nothing, and the backward repeats the call first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import Node

from plait.engine.compilation.layer_call_state import LayerCall
from plait.engine.compilation.layer_operations import LayerOperation, StoredResult, Values, arguments_of
from plait.tensor.autograd.eager_operations import AutogradCall, LayerTrace
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.autograd.private_torch_functions import apply_function, run_backward


@dataclass
class AutogradRun:
    """Values that the backward of an eager autograd call needs."""

    outputs: Sequence[GradientEdge]
    """The nodes of autograd's graph of the results with a gradient; without the results' memory."""
    gradients: list[Tensor]
    """Of the inputs that need one, once the backward has run."""
    parameters: Sequence[nn.Parameter]
    """Those of the layer, if the backward adds gradients to some of them."""


def autograd_call(node: Node, slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that runs a graph node's call eagerly, with autograd if its backward is needed."""
    inputs, number, once, shapes, *_ = arguments_of(node)
    recorded: AutogradCall = trace.calls[number]
    *results, saved = (StoredResult.of(node, index, slots) for index in range(len(shapes)))
    output_is_read = any(one.slots for one in results)

    def compute(module: nn.Module | None, given: Sequence[Tensor], call: LayerCall) -> Sequence[Tensor]:
        if once:
            return recorded.compute(module, *given)
        run = call.repeated(number)
        run.output_is_read = output_is_read
        token = RECOMPUTED_RUN.set(run)
        try:
            return recorded.compute(module, *given)
        finally:
            RECOMPUTED_RUN.reset(token)
            run.is_second = True

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        module = None if recorded.module is None else call.modules[recorded.module]
        if not saved.slots:
            made = compute(module, given, call)
        else:
            torch.set_grad_enabled(True)
            try:
                given, gradients = _with_gradients(given, recorded.learns)
                made = compute(module, given, call)
            finally:
                torch.set_grad_enabled(False)
            edges = [get_gradient_edge(one) for one in made if one.is_floating_point()]
            parameters = call.parameters if recorded.has_parameters else ()
            for slot in saved.slots:
                values[slot] = AutogradRun(edges, gradients, parameters)
        for one, result in zip(made, results, strict=True):
            result.store(values, one.detach())

    return LayerOperation([slots[one] for one in inputs], run)


def autograd_call_backward(node: Node, slots: Mapping[Node, int]) -> LayerOperation:
    """Return the operation that runs an eager call's backward, and adds the gradients of parameters."""
    gradients, saved, inputs, *_ = arguments_of(node)
    results = [StoredResult.of(node, index, slots) for index in range(inputs)]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        *gradients, made = given
        call.add_gradients(made.parameters, partial(run_backward, made.outputs, gradients))
        for gradient, result in zip(made.gradients, results, strict=True):
            result.store(values, gradient)

    return LayerOperation([slots[one] for one in (*gradients, saved)], run)


def _with_gradients(tensors: Sequence[Tensor], learns: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of `tensors` that require gradients where they train, and a list for those gradients."""
    gradients: list[Tensor] = []
    learning = [one for one, learn in zip(tensors, learns, strict=True) if learn]
    if not learning:
        return list(tensors), gradients
    anchor = learning[0].new_empty(0).requires_grad_()
    views = iter(apply_function(_Given, anchor, gradients, *learning))
    return [next(views) if learn else one for one, learn in zip(tensors, learns, strict=True)], gradients


class _Given(torch.autograd.Function):
    """Autograd function that returns views of tensors, and appends their gradients to a list in its backward.

    Leaves with `.grad` would stay in memory until then, also those that the call does not save.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.gradients += gradients
        return (None,) * (2 + len(gradients))
