"""The end of the last stage: the loss, and the gradient that the backward starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.layers.nested import Value, tensors_of
from plait.pipeline.stage import Gradients


class LossLike(Protocol):
    """A loss as a sum; its weight is applied by the scale that `begin` is given."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """The summed loss of one micro-batch, 0-d."""


class LossStage:
    """Computes each micro-batch's loss and, for training, the gradient of the global mean."""

    def __init__(self, loss: LossLike, *, writes_output: bool = False) -> None:
        """`writes_output`: the loss may write to the memory of the output."""
        self.loss = loss
        self.writes_output = writes_output
        self._totals: dict[int, Tensor] = {}
        self._outputs: dict[int, Value] = {}
        self._targets: Sequence[Value] = ()
        self._scale: Tensor | None = None
        self._open: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def begin(self, targets: Sequence[Value], scale: Tensor | None) -> None:
        """Start a step: the targets per micro-batch, and what the gradient is multiplied by (0-d)."""
        self._totals, self._outputs = {}, {}
        self._targets, self._scale = targets, scale

    def compute(self, microbatch: int, output: Value) -> None:
        """The loss of one micro-batch, as a sum; see `totals`."""
        total = self.loss.total(output, self._targets[microbatch])
        if not isinstance(total, Tensor) or total.dim():
            shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ModelError(f"loss.total gave {shape}: give the summed loss as a 0-d tensor.")
        self._totals[microbatch] = total.detach()
        if torch.is_grad_enabled():
            self._open[microbatch] = total, list(tensors_of(output))

    def total(self, microbatch: int) -> Tensor:
        """The summed loss of a micro-batch of the latest step."""
        return self._totals[microbatch]

    @property
    def totals(self) -> list[Tensor]:
        """The summed loss of each micro-batch, in their order, whatever the schedule's."""
        return [self._totals[microbatch] for microbatch in sorted(self._totals)]

    def keep(self, microbatch: int, output: Value) -> None:
        """Keep the output of one micro-batch for the caller; there are no targets."""
        self._outputs[microbatch] = output

    def take_outputs(self) -> list[Value]:
        """Return the outputs that were kept, in the order of the micro-batches, and forget them."""
        outputs, self._outputs = self._outputs, {}
        return [outputs[microbatch] for microbatch in sorted(outputs)]

    def seed(self, microbatch: int) -> Gradients:
        """The gradient of the global mean loss in the last layer's output."""
        total, leaves = self._open.pop(microbatch)
        if total.requires_grad:
            assert self._scale is not None, "a training step begins with a scale"
            torch.autograd.backward(total, self._scale.to(total.dtype))
        return [leaf.grad for leaf in leaves]

    def clear(self) -> None:
        """Forget what is in flight."""
        self._open.clear()
        self._outputs.clear()
