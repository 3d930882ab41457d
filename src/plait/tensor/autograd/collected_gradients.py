"""Gradients that autograd computes at once, collected in a backward and then added to their buffers together.

A block has about ten biases and norms: added by autograd, each is an operation of a few bytes, or two where
the buffer has a wider dtype. Collected, those of all layers that ran together are one. Gradients of matrices
are collected too, where autograd computes them, while their buffers hold nothing of the step yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from plait.tensor.autograd.many_tensors import add_each
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue

Held = list[tuple[nn.Parameter, Tensor]]
"""Parameters whose `.grad` is set aside, and their gradient buffers."""


def set_aside(parameters: Iterable[nn.Parameter], queue: WeightGradientQueue) -> Held:
    """Set the `.grad` of parameters to None, so that a backward does not add to it; return their buffers.

    Deferred weight gradients find the buffers in `queue`.
    """
    held = [(parameter, buffer) for parameter in parameters if (buffer := parameter.grad) is not None]
    for parameter, buffer in held:
        queue.buffers[id(parameter)], parameter.grad = buffer, None
    return held


def put_back(held: Held, queue: WeightGradientQueue) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Set each `.grad` to its buffer again; return the parameters with a new gradient, and the gradients."""
    queue.buffers.clear()
    parameters, gradients = [], []
    for parameter, buffer in held:
        gradient, parameter.grad = parameter.grad, buffer
        if gradient is not None:
            parameters.append(parameter)
            gradients.append(gradient)
    return parameters, gradients


def add_found(parameters: list[nn.Parameter], gradients: list[Tensor], queue: WeightGradientQueue) -> None:
    """Add the gradients of parameters that a backward has computed to their buffers, in one operation."""
    if queue.unwritten:
        queue.set_to_zero(parameters)
    totals = []
    for parameter in parameters:
        assert parameter.grad is not None, "a gradient buffer is set before a backward"
        totals.append(parameter.grad)
    add_each(totals, gradients)
