"""The scales of the operands of linears and experts in float8, in one run of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.verification.definitions.float8 import SMALLEST

LEAST = 2 * SMALLEST / torch.finfo(torch.float8_e4m3fn).max
"""What a number of 1 stands for where all elements are smaller than 1e-12, at most."""


@dataclass
class OperandScales:
    """Collects the scales of float8 operands in a micro-batch, by path of the linear and operand."""

    found: dict[str, Tensor] = field(default_factory=dict)
    """By `path|operand`; of a linear that runs more than once empty, since nothing tells its runs apart."""
    _tables: dict[str, dict[object, Tensor]] = field(default_factory=dict)
    """Of experts, by `path|operand` and call."""

    def begin(self) -> None:
        """Forget the scales, before a micro-batch runs."""
        self.found.clear()
        self._tables.clear()

    def note(self, path: str, operand: str, unit: Tensor) -> None:
        """Record the scales of an operand of the linear at `path`; an empty tensor if it has run before."""
        name = f"{path}|{operand}"
        self.found[name] = noted(unit)[:0] if name in self.found else noted(unit)

    def table(self, call: object, path: str, operand: str, shape: tuple[int, int]) -> Tensor:
        """Return the table to which a `call` of experts writes the scales of an operand; -1 is none."""
        tables = self._tables.setdefault(f"{path}|{operand}", {})
        if call not in tables:
            tables[call] = torch.full(shape, -1.0)
            self.found[f"{path}|{operand}"] = tables[call] if len(tables) == 1 else tables[call][:0]
        return tables[call]


def noted(unit: Tensor) -> Tensor:
    """Return the scales as compared, float32 `[count]`: 0 for operands of zeros, or of values below 1e-12.

    `count`: 1, or a scale for each token, or for each input or output feature. Some gradients, as that of the
    first query of causal attention, are zero or nothing but rounding.
    """
    flat = unit.flatten().float()
    return flat.where((flat != 1) & (flat > LEAST), 0.0)
