"""The values that the steps of a compiled layer read and store, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.autograd.regather import Gather, Regathered
from plait.compilation.weight_terms import WeightTerm

Values = list[Any]
"""By slot a tensor, `Regathered` or `AttentionRun`; None before it is computed, and after its last use."""


class LayerCall(Protocol):
    """Protocol of one call of a layer: gives its steps its dropouts, and queues weight gradients."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of a call of the dropout `name`, the same each time for a number."""

    def dropout(self, name: str) -> nn.Module:
        """Return the layer's dropout `name`."""

    def regathered(self, piece: Tensor, gather: Gather) -> Regathered:
        """Return a tensor that is gathered from the ranks' pieces, again, when it is first used."""

    def defer(self, term: WeightTerm, operands: Sequence[Tensor | Regathered]) -> None:
        """Queue the computation of `term`, a part of a weight gradient, from `operands`."""


def taken(values: Values, slots: Sequence[int], done: Sequence[int]) -> list[Any]:
    """Return the values of `slots`, and let go of those of `done`, so that a graph can free them early."""
    found = list(map(values.__getitem__, slots))
    for slot in done:
        values[slot] = None
    return found


@dataclass(frozen=True)
class Results:
    """The slots of one result of a step, and its strides, for which later graphs are made."""

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
