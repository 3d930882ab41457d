"""What both sides are given: a model with its data and its loss, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.tensor.losses import CrossEntropy, Loss
from plait.tensor.nested_values import Value, map_tensors

SEED = 11
ROWS = 2
"""Of one micro-batch."""
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
EPSILON = 1e-6
"""Of AdamW, which multiplies the noise of a gradient that is exactly zero by LEARNING_RATE / EPSILON."""

Batch = tuple[Value, Value]
"""Inputs and targets."""
DrawBatch = Callable[[int, torch.Generator], Batch]
Mean = Callable[[Any, Any], Tensor]


def mean_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own mean, over the last dim."""
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's output."""
    return model(inputs)


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss; `mean` is the same loss in plain PyTorch, over the whole global batch.

    `draw(rows, generator)` makes a global batch; its numbers may be of any floating-point dtype.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: DrawBatch
    loss: Loss = CrossEntropy()  # noqa: RUF009 (frozen)
    mean: Mean = mean_cross_entropy
    reference: Callable[[nn.Module, Any], Any] = called
    """How plain PyTorch computes the output."""

    def batches(self, rows: int, count: int, dtype: torch.dtype) -> list[Batch]:
        """`count` global batches of `rows` rows, the same on every rank, whatever the layout."""
        generator = torch.Generator().manual_seed(SEED)

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        drawn = [self.draw(rows, generator) for _ in range(count)]
        return [(map_tensors(convert, inputs), map_tensors(convert, targets)) for inputs, targets in drawn]


@dataclass(frozen=True)
class Recipe:
    """What is done: `steps` times `calls` backwards on fresh data, clipping and a step of the optimizer.

    `clip` is small, so that it bites. AdamW decays matrices and leaves vectors alone.
    """

    steps: int = 3
    calls: int = 1
    clip: float = 0.05
    optimizer: Literal["adamw", "sgd"] = "adamw"
    set_to_none: bool = True

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """On parameter groups that say their own decay."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9)


def rows_of(value: Value, start: int, stop: int) -> Value:
    """Rows `start … stop` of every tensor."""
    return map_tensors(lambda tensor: tensor[start:stop], value)
