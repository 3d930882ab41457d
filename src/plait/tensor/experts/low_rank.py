"""Low-rank adapters of experts' matrices, `[E, out, in]`: one `down` and one `up` for each expert.

    rows of the output += scale · up (down rows of the input)

The matrix with the adapter added is never made: it would be as large as the experts, for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.tensor.experts.grouped_products import Groups, add_grouped_product, grouped_product

Add = Callable[[Tensor, bool], None]
"""Adds a weight gradient to a buffer, or writes it there."""
Rows = Callable[[], Tensor]
"""Returns `[rows, width]`, made when it is needed."""


@dataclass(frozen=True)
class LowRank:
    """The low-rank adapter (LoRA) of one matrix of each expert."""

    down: Tensor
    """`[experts, rank, in]`."""
    up: Tensor
    """`[experts, out, rank]`."""
    scale: float

    def to(self, dtype: torch.dtype) -> LowRank:
        """Return the adapter cast to `dtype`; autograd casts its gradients back."""
        return LowRank(self.down.to(dtype), self.up.to(dtype), self.scale)

    def add_outputs(self, outputs: Tensor, inputs: Tensor, groups: Groups) -> None:
        """Add the adapter's outputs for `inputs`, `[rows, in]`, to `outputs`, `[rows, out]`."""
        outputs += grouped_product(self.narrow(inputs, groups), self.up.transpose(1, 2), groups)

    def add_input_gradients(self, of_inputs: Tensor, of_outputs: Tensor, groups: Groups) -> Tensor:
        """Add the gradients of the inputs to `of_inputs`; return those of `narrow`, times `scale`."""
        of_narrow = grouped_product(of_outputs, self.up, groups).mul_(self.scale)
        of_inputs += grouped_product(of_narrow, self.down, groups)
        return of_narrow

    def narrow(self, inputs: Tensor, groups: Groups) -> Tensor:
        """Return each row times `scale` and the `down` of its expert: `[rows, rank]`."""
        return grouped_product(inputs, self.down.transpose(1, 2), groups).mul_(self.scale)


def weight_gradients(
    inputs: Rows, narrow: Tensor, of_narrow: Tensor, of_outputs: Rows, groups: Groups
) -> tuple[Add, Add]:
    """Return functions that compute the gradients of `down` and `up` later, without reading a parameter."""

    def add_down(total: Tensor, first: bool) -> None:
        add_grouped_product(total, of_narrow, inputs(), groups, first)

    def add_up(total: Tensor, first: bool) -> None:
        add_grouped_product(total, of_outputs(), narrow, groups, first)

    return add_down, add_up
