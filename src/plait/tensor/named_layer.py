"""`NamedLayer`: a layer, its path in the model, and how it runs on a part of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from plait.tensor.nested_values import Value

RunOnParts = Callable[[nn.Module, Value, int], tuple[Value, int]]
"""Runs a module between layers that exchange parts of a sequence; see `NamedLayer.run`."""


@dataclass(frozen=True)
class NamedLayer:
    """A layer and its path in the model, as in `named_modules`."""

    path: str
    module: nn.Module
    run_on_parts: RunOnParts | None = None
    """With sequence parallelism: how the module runs where its input or output is a part of a sequence."""

    def run(self, value: Value, length: int) -> tuple[Value, int]:
        """Return the layer's output, and the whole sequence length to pass to the next layer as `length`.

        `length`: the length of the sequence of which `value` holds a part; 0 if it is not in parts yet.
        """
        if self.run_on_parts is None:
            return self.module(value), length
        return self.run_on_parts(self.module, value, length)
