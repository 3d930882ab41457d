"""`adds_late` of a queue: where each micro-batch is reduced by itself, `W` alone adds its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_stage import FailBackward, backward, forward, is_empty, stage_of
from torch import Tensor, nn

from plait.engine.pipeline.stage import Stage


class Twice(nn.Module):
    """Uses its parameter twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value * self.scale) * self.scale


def late_stage(*, adds_late: bool) -> tuple[Stage, dict[str, nn.Parameter]]:
    """Linears, whose weights are deferred, and biases, a norm and a scale, which autograd takes care of."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.LayerNorm(4), Twice(4), nn.Linear(4, 3)]
    layers[3].bias.requires_grad_(False)
    stage = stage_of(*layers, batch=torch.randn(2, 3))
    stage.queue.adds_late = adds_late
    return stage, dict(nn.Sequential(*layers).named_parameters())


def added(parameters: dict[str, nn.Parameter]) -> set[str]:
    """The parameters to whose gradients something was added."""
    return {name for name, one in parameters.items() if one.grad is not None and one.grad.any()}


ADDED_BY_AUTOGRAD = {"0.bias", "1.weight", "1.bias", "2.scale"}
DEFERRED = {"0.weight", "3.weight"}


@pytest.mark.parametrize("adds_late", [False, True])
def test_deferred_weight_work_adds_all_gradients_or_only_deferred_ones(adds_late: bool) -> None:
    stage, parameters = late_stage(adds_late=adds_late)
    buffers = {name: one.grad for name, one in parameters.items()}
    forward(stage, torch.randn(2, 3))
    stage.gradients[0] = [torch.ones(2, 3)]
    for layer in reversed(range(4)):
        stage.backward_input(0, layer)
    stage.gradients.pop(0)
    assert added(parameters) == (set() if adds_late else ADDED_BY_AUTOGRAD)
    assert all(one.grad is buffers[name] for name, one in parameters.items())
    for layer in reversed(range(4)):
        stage.backward_weight(0, layer)
    assert added(parameters) == ADDED_BY_AUTOGRAD | DEFERRED
    assert is_empty(stage)
    assert stage.queue.buffers == {}


@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_that_are_added_late_are_the_same_bits(at_once: bool) -> None:
    """Of two micro-batches whose weight work comes after both; or of full backwards."""
    results = []
    for adds_late in (False, True):
        stage, parameters = late_stage(adds_late=adds_late)
        for number in range(2):
            batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
            forward(stage, batch, number)
            stage.gradients[number] = [batch + 1]
            for layer in reversed(range(4)):
                (stage.backward if at_once else stage.backward_input)(number, layer)
        for number, layer in list(stage.work):
            stage.backward_weight(number, layer)
        results.append({name: one.grad for name, one in parameters.items() if one.requires_grad})
    early, late = results
    assert early.keys() == late.keys() == ADDED_BY_AUTOGRAD | DEFERRED
    assert all(torch.equal(early[name], gradient) for name, gradient in late.items())


class Before(nn.Module):
    """Calls a function before a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(self.function(value))


def test_work_done_while_a_backward_waits_adds_to_gradients_set_aside() -> None:
    """As in a region whose input gradient is summed over other ranks."""
    seen: list[bool] = []

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            stage.queue.overlap()
            seen.append(linear.weight.grad is None and bool(buffer.any()))
            return gradient

    linear = nn.Linear(2, 2)
    stage = stage_of(Before(Waits.apply, linear), batch=torch.ones(1, 2))
    stage.queue.adds_late, buffer = True, linear.weight.grad
    forward(stage, torch.ones(1, 2))
    stage.gradients[0] = [torch.ones(1, 2)]
    stage.backward(0, 0)
    assert seen == [True]
    assert linear.weight.grad is buffer
    assert buffer.tolist() == [[1.0, 1.0]] * 2


def test_a_backward_that_fails_leaves_gradients_where_they_were() -> None:
    norm = nn.LayerNorm(2)
    stage = stage_of(Before(FailBackward.apply, norm), batch=torch.ones(1, 2))
    stage.queue.adds_late, buffer = True, norm.weight.grad
    forward(stage, torch.ones(1, 2))
    with pytest.raises(ZeroDivisionError):
        backward(stage, torch.ones(1, 2))
    assert norm.weight.grad is buffer
    assert not buffer.any()
    assert stage.queue.buffers == {}
