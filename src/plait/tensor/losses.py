"""Losses as a sum and the weight that the sum is divided by.

Every layout gives the same mean only if the division is by a number that belongs to the global batch. So
a loss says its sum over the targets it is shown, and how much those targets count; plait adds both up over
micro-batches and ranks, and divides once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional


@runtime_checkable
class Loss(Protocol):
    """What `parallelize` accepts as a loss: any object with these two methods."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """The summed loss of one micro-batch, 0-d, differentiable in `output`."""

    def weight(self, targets: Any) -> Tensor:
        """What the sum is divided by, 0-d, additive over micro-batches: say, the number of counted tokens."""


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits `[..., classes]` and class numbers `[...]`; `ignore_index` counts nothing."""

    ignore_index: int = -100
    label_smoothing: float = 0.0

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum over all counted targets, 0-d, in at least float32."""
        logits = output.reshape(-1, output.shape[-1])
        return functional.cross_entropy(
            logits if logits.dtype == torch.float64 else logits.float(),
            targets.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )

    def weight(self, targets: Tensor) -> Tensor:
        """The number of counted targets, 0-d."""
        return (targets != self.ignore_index).sum()


cross_entropy = CrossEntropy()
"""Cross-entropy over the last dim, mean over all targets of the global batch but those of -100."""
