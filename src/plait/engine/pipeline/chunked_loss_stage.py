"""The loss stage where the last layer returns features, and the loss computes logits from them in chunks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from plait.engine.pipeline.loss_stage import LossLike, LossStage
from plait.engine.pipeline.stage import Gradients
from plait.tensor.layer_values import Value


class ChunkedLossLike(LossLike, Protocol):
    """Interface of a loss that takes features, the input of the output linear, and computes logits itself."""

    def gradient(self, features: Any, targets: Any, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the summed loss and the features' gradient; add those of the linear's parameters."""

    def logits(self, features: Any) -> Tensor:
        """Return the logits of all features."""


class ChunkedLossStage(LossStage):
    """Computes loss and gradients of each micro-batch in one pass, when its backward starts.

    So in a training step the loss of a micro-batch is known after `seed`. The last layer's parameters have to
    be gathered in `compute`, `seed` and `keep`, and its gradients allocated in `seed`.
    """

    def __init__(self, loss: ChunkedLossLike) -> None:
        super().__init__(loss)
        self._chunks = loss
        self._features: dict[int, Value] = {}

    def compute(self, microbatch: int, output: Value) -> None:
        """Keep the features of one micro-batch for `seed`; without gradients compute its summed loss."""
        if torch.is_grad_enabled():
            self._features[microbatch] = output
        else:
            super().compute(microbatch, output)

    def keep(self, microbatch: int, output: Value) -> None:
        """Keep the logits of one micro-batch, in a step without targets."""
        super().keep(microbatch, self._chunks.logits(output))

    def seed(self, microbatch: int) -> Gradients:
        """Compute the summed loss, and the gradients of the mean loss; return that of the features."""
        features, targets = self._features.pop(microbatch), self._targets[microbatch]
        assert self._scale is not None, "a training step has a scale"
        self._totals[microbatch], gradient = self._chunks.gradient(features, targets, self._scale)
        return [gradient]

    def clear(self) -> None:
        """Discard all unfinished micro-batches."""
        super().clear()
        self._features.clear()
