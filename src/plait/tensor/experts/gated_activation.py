"""`GatedActivation`: the activation between an expert's two products, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class GatedActivation:
    """Computes `gate · sigmoid(slope · gate) · (up + offset)`, by default `silu(gate) · up`."""

    slope: float = 1.0
    offset: float = 0.0
    limit: float | None = None
    """The largest value of `gate`, and the largest magnitude of `up`: others are clamped to it."""
    interleaved: bool = False
    """Whether features of gate and up take turns, in place of all of the gate before all of `up`."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return the activation `[rows, F]` of gate and up, `[rows, 2F]`, in new memory."""
        gate, up = self._split(gate_up)
        return self._swish(self._scaled(gate)).mul_(self._factor(up))

    def with_gradient(self, gate_up: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the activation, and a function from its gradient to that of `gate_up`; both new memory.

        The function overwrites its argument.
        """
        gate, up = self._split(gate_up)
        inner, factor = self._scaled(gate), self._factor(up)
        swish = self._swish(inner)

        def gradient(of_activated: Tensor) -> Tensor:
            result = torch.empty_like(gate_up)
            of_gate, of_up = self._split(result)
            torch.mul(of_activated, swish, out=of_up)
            of_swish = of_activated.mul_(factor)
            torch.ops.aten.silu_backward.grad_input(of_swish, inner, grad_input=of_gate)
            if self.limit is not None:
                of_gate.masked_fill_(gate > self.limit, 0)
                of_up.masked_fill_(up.abs() > self.limit, 0)
            return result

        return swish * factor, gradient

    def _split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up: views of `[rows, 2F]`."""
        if self.interleaved:
            return gate_up[:, ::2], gate_up[:, 1::2]
        gate, up = gate_up.chunk(2, dim=1)
        return gate, up

    def _scaled(self, gate: Tensor) -> Tensor:
        clamped = gate if self.limit is None else gate.clamp(max=self.limit)
        return clamped if self.slope == 1 else clamped * self.slope

    def _swish(self, scaled: Tensor) -> Tensor:
        """Return `gate · sigmoid(slope · gate)`, given `slope · gate`: by a kernel that rounds once."""
        swish = functional.silu(scaled)
        return swish if self.slope == 1 else swish.div_(self.slope)

    def _factor(self, up: Tensor) -> Tensor:
        clamped = up if self.limit is None else up.clamp(-self.limit, self.limit)
        return clamped if self.offset == 0 else clamped + self.offset
