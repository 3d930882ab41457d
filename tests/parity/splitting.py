"""Modules of a user's own that split their backward, and what notes each call of theirs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad

from parity.layers import CLASSES, HIDDEN
from plait.rules import column, entrance, row

CALLS: Counter[str] = Counter()
"""Of this process: F, I and W of both classes."""


class Scale(nn.Module):
    """A feature by a factor of its own, then a shift; uses two inputs if it is given them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def split_forward(self, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        CALLS["F"] += 1
        return x * self.weight + self.shift, (x, "note")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift

    def input_gradient(self, gradient: Tensor, x: Tensor, note: str) -> Tensor:
        CALLS["I"] += 1
        assert note == "note"
        return gradient * self.weight

    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor, note: str) -> dict[str, Tensor]:
        CALLS["W"] += 1
        return {"weight": (gradient * x).flatten(0, -2).sum(0), "shift": gradient.flatten(0, -2).sum(0)}


class SplitConvolution(nn.Conv1d):
    """A convolution over the features `[rows, HIDDEN]`, by `torch.nn.grad`."""

    def __init__(self) -> None:
        super().__init__(1, 2, 3)

    def split_forward(self, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        return super().forward(x.unsqueeze(1)), (x.unsqueeze(1), self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.split_forward(x)[0]

    def input_gradient(self, gradient: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return grad.conv1d_input(x.shape, self.weight, gradient).squeeze(1)

    @staticmethod
    def weight_gradients(gradient: Tensor, x: Tensor, shape: torch.Size) -> dict[str, Tensor]:
        return {"weight": grad.conv1d_weight(x, shape, gradient), "bias": gradient.sum((0, 2))}


class Both(nn.Module):
    """Two uses of one split module in a layer, beside a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = Scale(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale(torch.tanh(self.linear(self.scale(x)))))


class Region(nn.Module):
    """A split module whose output enters a region of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up, self.down = Scale(HIDDEN), nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.scale(x))))
        return result


def split_entrance() -> nn.Module:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Region(), nn.Linear(HIDDEN, CLASSES))
    model.rules = {"1.scale": entrance, "1.up": column, "1.down": row}
    return model


def split_modules() -> nn.Module:
    """First, in the middle, shared between layers, and frozen in part."""
    first, shared = Scale(HIDDEN), Scale(HIDDEN)
    first.shift.requires_grad_(False)
    return nn.Sequential(
        first,
        Both(),
        shared,
        nn.Tanh(),
        shared,
        SplitConvolution(),
        nn.Flatten(),
        nn.Linear(2 * (HIDDEN - 2), CLASSES),
    )
