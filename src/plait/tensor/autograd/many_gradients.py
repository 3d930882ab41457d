"""Gradients of many parameters in few operations: on a GPU few kernels, which the host starts by one call.

A block has about ten biases and norms: added by autograd, each is an operation of a few bytes, or two where
the buffer has a wider dtype. Collected in a backward (`set_aside`, `put_back`), those of all layers that ran
together are added to their buffers in one. Gradients of matrices are collected too, where autograd computes
them, while their buffers hold nothing of the step yet.

`torch._foreach_add_` and its like have private names, but all optimizers of torch build on them;
`tests/unit/tensor/autograd/test_many_gradients.py` shows what is relied on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plait.ranks.device import is_accelerator
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


def zero_each(tensors: list[Tensor]) -> None:
    """Fill tensors with zeros."""
    if tensors:
        torch._foreach_zero_(tensors)


def multiply_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by `factor`, 0-d, of their dtype and device."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def add_each(totals: list[Tensor], gradients: list[Tensor]) -> None:
    """Add each gradient to its total in place; totals may have a wider dtype."""
    if not totals:
        return
    if is_accelerator(totals[0]) and any(
        total.dtype != one.dtype for total, one in zip(totals, gradients, strict=True)
    ):
        gradients = _in_dtypes_of(totals, gradients)  # unlike dtypes would be added one by one
    torch._foreach_add_(totals, gradients)


def _in_dtypes_of(totals: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients in the dtypes of their totals: in two operations, if they have one dtype each."""
    alike = len({one.dtype for one in totals}) == len({one.dtype for one in gradients}) == 1
    if not alike:
        return [one.to(total.dtype) for total, one in zip(totals, gradients, strict=True)]
    flat = torch.cat([one.reshape(-1) for one in gradients]).to(totals[0].dtype)
    parts = torch.split(flat, [one.numel() for one in gradients])
    return [part.view(total.shape) for part, total in zip(parts, totals, strict=True)]
