"""What a split backward keeps and repeats: plait's stage beside what PyTorch's stages call. One process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from live import LiveBytes
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from work import CONTEXT, HIDDEN, build

from plait.engine.pipeline.stage import Stage
from plait.models.layers.layer_sequence import sequence_of
from plait.models.layers.shape_inference import infer
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.nested_values import leaf_of

SHAPE = (1, CONTEXT, HIDDEN)
LAYERS = {"attention": slice(1, 2), "MLP": slice(2, 3), "a stage of 4 blocks": slice(1, 9)}
"""Of the model's sequence."""

Between = Callable[[], None]
"""Called after the input's gradient and before the weights'."""
Split = Callable[[nn.Sequential, Between], None]
"""Forward, input gradient and weight gradients of a stage that stands between two others.

It is given on the meta device. Its input and its output's gradient are there from the beginning.
"""


class Scale(torch.autograd.Function):
    """`x · w` for a weight of its own; counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Scale.calls += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Custom(nn.Module):
    """A linear and such a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scale.apply(self.linear(x), self.scale)
        return scaled


def by_plait(model: nn.Sequential, between: Between) -> None:
    """As a stage of plait does it. What is received lies in buffers until the end, as in the engine."""
    received = leaf_of(torch.zeros(SHAPE), True), torch.ones(SHAPE)
    infos = infer(sequence_of(model).layers, received[0], input_gradients=True)
    _fill(model)
    queue = WeightGradientQueue()
    defer_weight_gradients(model, queue)
    stage = Stage(0, sequence_of(model).layers, queue, [infos])
    layers = range(len(stage.layers))
    stage.values[0] = received[0]
    for layer in layers:
        stage.forward(0, layer)
    stage.values.pop(0)
    stage.gradients[0] = [received[1]]
    for layer in reversed(layers):
        stage.backward_input(0, layer)
    between()
    stage.gradients.pop(0)
    for layer in reversed(layers):
        stage.backward_weight(0, layer)


def by_torch(model: nn.Sequential, between: Between) -> None:
    """As PyTorch's stages do it, with all that they keep meanwhile."""
    _fill(model)
    inputs, gradients = [torch.zeros(SHAPE).requires_grad_()], [torch.ones(SHAPE)]
    outputs = [model(*inputs)]
    kept, groups = stage_backward_input(outputs, gradients, inputs, model.parameters())
    between()
    del kept
    stage_backward_weight(model.parameters(), groups)


def live_between(split: Split, layers: slice) -> int:
    """Bytes alive between the two halves, without parameters and their gradients."""
    found: list[int] = []
    model = nn.Sequential(*(layer.module for layer in sequence_of(build()).layers[layers]))
    live = LiveBytes()
    with live:
        split(model, lambda: found.append(live.count() - 2 * _size(model)))
    return found[0]


def backward_calls(split: Split) -> int:
    """How often the backward of a Function runs for one micro-batch."""
    with torch.device("meta"):
        model = nn.Sequential(Custom(), Custom())
    before = Scale.calls
    split(model, lambda: None)
    return (Scale.calls - before) // len(model)


def _fill(model: nn.Module) -> None:
    """Values, and gradients to add to."""
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
        parameter.grad = torch.zeros_like(parameter)


def _size(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
