"""The values that the steps of a compiled layer read and store, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.engine.compilation.weight_terms import WeightTerm
from plait.tensor.autograd.regather import Gather, Regathered

Values = list[Any]
"""By slot a tensor, `Regathered` or `AttentionRun`; None before it is computed, and after its last use."""


class LayerCall(Protocol):
    """Protocol of one call of a layer: gives its steps its dropouts, and queues weight gradients."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of call `number` of the dropout `name`; asked again, the same mask."""

    def dropout(self, name: str) -> nn.Module:
        """Return the layer's dropout module `name`."""

    def regathered(self, piece: Tensor, gather: Gather) -> Regathered:
        """Return a tensor whose all-gather from the ranks' parts is repeated on first use."""

    def defer(self, term: WeightTerm, operands: Sequence[Tensor | Regathered]) -> None:
        """Queue the computation of `term`, a part of a weight gradient, from `operands`."""


def taken(values: Values, slots: Sequence[int], done: Sequence[int]) -> list[Any]:
    """Return the values of `slots`, and drop the references in the slots `done`, so that graphs free them."""
    found = list(map(values.__getitem__, slots))
    for slot in done:
        values[slot] = None
    return found


@dataclass(frozen=True)
class Results:
    """The slots that store one result of a step, and the strides that later graphs expect of it."""

    slots: Sequence[int]
    stride: tuple[int, ...]

    def store(self, values: Values, tensor: Tensor) -> None:
        """Store `tensor`, or a copy with the strides of the trace."""
        if self.slots:
            made = tensor if tensor.stride() == self.stride else with_strides(tensor, self.stride)
            for slot in self.slots:
                values[slot] = made


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `tensor` with the strides `stride`."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
