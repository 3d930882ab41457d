"""What a compiled layer runs between its graphs: collectives, and the masks of dropouts.

While a layer is traced, `TRACE` holds its `LayerTrace`. A collective is then not run but recorded, as an
operator with a number, of which the trace knows only the shape of the result. The layer's graphs end before
such an operator and begin after it; what it stands for runs between them, as without compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Operation = Callable[[Tensor], Tensor]

torch.library.define("plait::between_graphs", "(Tensor input, int number, SymInt[] shape) -> Tensor")
torch.library.define("plait::dropout_mask", "(int number, SymInt[] shape, Device device) -> Tensor")
BETWEEN_GRAPHS: Any = torch.ops.plait.between_graphs.default
"""Operator for a recorded operation; `number` is that of the operation in the trace."""
DROPOUT_MASK: Any = torch.ops.plait.dropout_mask.default
"""Operator for the mask of a dropout's call; `number` is that of the call in the trace."""


def _like_between_graphs(input: Tensor, number: int, shape: Sequence[int]) -> Tensor:
    return input.new_empty(shape)


def _like_dropout_mask(number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


torch.library.register_fake("plait::between_graphs", _like_between_graphs)
torch.library.register_fake("plait::dropout_mask", _like_dropout_mask)


@dataclass
class LayerTrace:
    """The operations and masks that a layer has recorded while it was traced."""

    names: Mapping[int, str]
    """Each dropout's name in the layer, by the module's `id`."""
    operations: list[Operation] = field(default_factory=list)
    writes: set[int] = field(default_factory=set)
    """Numbers of operations that write to their input."""
    masks: list[str] = field(default_factory=list)
    """Per mask the name of its dropout."""

    def record(
        self,
        input: Tensor,
        shape: Sequence[int],
        forward: Operation | None,
        backward: Operation | None,
        *,
        writes: bool = False,
    ) -> Tensor:
        """Record `forward` and its `backward`; return a tensor of `shape` in place of the result.

        None returns the tensor as it is. `writes`: `forward` may write to its input.
        """
        numbers: list[int | None] = []
        for operation in (forward, backward):
            numbers.append(None if operation is None else len(self.operations))
            if operation is not None:
                self.operations.append(operation)
        if writes and numbers[0] is not None:
            self.writes.add(numbers[0])
        recorded: Tensor = _Recorded.apply(input, tuple(shape), *numbers)  # type: ignore[no-untyped-call]
        return recorded

    def dropout_mask(self, module: nn.Module, shape: Sequence[int], device: torch.device) -> Tensor:
        """Record a dropout's call, and return a tensor in place of its mask: bool, of `shape`."""
        self.masks.append(self.names[id(module)])
        mask: Tensor = DROPOUT_MASK(len(self.masks) - 1, shape, device)
        return mask


TRACE: ContextVar[LayerTrace | None] = ContextVar("plait_layer_trace", default=None)
"""The trace of the layer that is being traced; None while layers run."""


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: tuple[int, ...], there: int | None, back: int | None
    ) -> Tensor:
        ctx.back, ctx.shape = back, tuple(input.shape)
        result: Tensor = input.view_as(input) if there is None else BETWEEN_GRAPHS(input, there, shape)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.back is not None:
            gradient = BETWEEN_GRAPHS(gradient, ctx.back, ctx.shape)
        return gradient, None, None, None
