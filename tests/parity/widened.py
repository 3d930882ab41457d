"""Models of transformers without their casts to float32, so that their float64 is float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Context in which a cast to float32 casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with float64 in place of float32."""
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
