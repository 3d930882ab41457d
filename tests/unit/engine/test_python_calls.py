"""How many Python functions a step calls for each layer and micro-batch: the host's cost, without a clock."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.plan.plan import Recompute

WIDTH, LAYERS, MICROBATCHES = 16, 32, 8


class Residual(nn.Module):
    """Two linears, ReLU and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Attentive(nn.Module):
    """Norm, attention of two heads, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = (one(normed).view(1, -1, 2, 8).transpose(1, 2) for one in (self.query, self.key, self.value))
        mixed = plait.attention(*heads).transpose(1, 2).reshape(x.shape)
        return x + self.output(mixed)


def calls_of_a_step(make_layer: Any, recompute: Recompute, compile: Any = False) -> float:
    """Calls of Python functions per layer and micro-batch, forward and backward, of one rank's third step."""
    plan = plait.Plan(microbatches=MICROBATCHES, recompute=recompute, compile=compile)
    model = nn.Sequential(*(make_layer() for _ in range(LAYERS)))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), nn.functional.mse_loss, broadcast=True)
    batch = torch.zeros(MICROBATCHES * 2, WIDTH)
    for _ in range(2):
        engine.forward_backward(batch, batch)
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        engine.forward_backward(batch, batch)
    finally:
        sys.setprofile(None)
    return calls / (LAYERS * MICROBATCHES)


@pytest.mark.parametrize(
    ("make_layer", "recompute", "most"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), "none", 28),
        (lambda: nn.Linear(WIDTH, WIDTH), "selective", 49),
        (lambda: nn.Linear(WIDTH, WIDTH), "full", 40),
        (Residual, "none", 52),
        (Residual, "selective", 140),
        pytest.param(Residual, "full", 126, marks=pytest.mark.full),
        (Attentive, "none", 102),
        pytest.param(Attentive, "selective", 385, marks=pytest.mark.full),
    ],
)
def test_a_layer_calls_few_python_functions(make_layer: Any, recompute: Recompute, most: int) -> None:
    assert plait.launch(calls_of_a_step, make_layer, recompute, ranks=1, ranks_as="threads")[0] <= most


@pytest.mark.parametrize(
    ("make_layer", "recompute", "most"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), "none", 48),
        pytest.param(Residual, "none", 68, marks=pytest.mark.full),
        (Residual, "selective", 65),
    ],
)
def test_a_compiled_layer_calls_few_python_functions(
    make_layer: Any, recompute: Recompute, most: int
) -> None:
    arguments = make_layer, recompute, "graphs"  # each operation of a graph is a call, without generated code
    assert plait.launch(calls_of_a_step, *arguments, ranks=1, ranks_as="threads")[0] <= most
