"""`LayerRecord`: copies of the tensors that one run of layers read and wrote, to run them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from plait.tensor.nested_values import Value, list_of_tensors, map_tensors


class GradientSnapshot(NamedTuple):
    """Copies of the flat gradient buffers of some layers, taken within a step."""

    flat: list[Tensor]
    unwritten: frozenset[int]
    """The ids of parameters whose gradients hold nothing of the step yet: their values do not count."""


Snapshot: TypeAlias = Callable[[int], GradientSnapshot]
"""Returns the gradients of layers as they are now, given the number of the last one that ran together."""


@dataclass
class LayerRecord:
    """Copies of the tensors that layers, run together, read and wrote for one micro-batch."""

    snapshot: Snapshot
    last: int = -1
    """The number of the last layer; -1 where none has run."""
    inputs: Value = None
    outputs: list[Tensor] = field(default_factory=list)
    given: list[Tensor | None] = field(default_factory=list)
    """The gradients of the outputs."""
    input_gradients: list[Tensor | None] = field(default_factory=list)
    buffers: list[GradientSnapshot] = field(default_factory=list)
    """The gradient buffers before and after the backward, or before and after `I` and then `W`."""
    is_fused: bool = False
    """Whether the backward was a `B`."""

    def begin_forward(self, inputs: Value, last: int) -> None:
        """Copy the inputs of the layers' forward."""
        self.last = last
        self.inputs = map_tensors(lambda one: one.detach().clone().requires_grad_(one.requires_grad), inputs)

    def end_forward(self, outputs: Value) -> None:
        """Copy the outputs of the layers' forward."""
        self.outputs = [one.detach().clone() for one in list_of_tensors(outputs)]

    def begin_backward(self, given: Sequence[Tensor | None]) -> None:
        """Copy the output gradient and the gradient buffers, before the layers' backward."""
        self.given = copies(given)
        self.snapshot_buffers()

    def end_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy the input gradient that the layers' backward returned: later code may write to it."""
        self.input_gradients = copies(gradients)
        if not self.is_fused:
            self.snapshot_buffers()

    def snapshot_buffers(self) -> None:
        """Copy the layers' flat gradient buffers, as they are now."""
        self.buffers.append(self.snapshot(self.last))


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return copies of tensors, without their graphs."""
    with torch.no_grad():
        return [None if one is None else one.detach().clone() for one in tensors]
