"""Casts inside of layers to a narrower dtype, such as a norm that computes in float32 in a model in float64.

What is computed behind such a cast has the rounding errors of the narrower dtype, so a perturbed reference
run adds errors of that size to the result of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.verification.reference.start_values import Perturbation

CASTS = frozenset(
    {"_to_copy", "copy_", "sum", "mean", "prod", "cumsum", "cumprod", "_softmax", "_log_softmax"}
)
"""ATen operations that may return another dtype than they are given."""


class NarrowingCasts(TorchDispatchMode):
    """Context: notes whether tensors of a dtype are cast to a narrower one, and perturbs the results."""

    def __init__(self, dtype: torch.dtype | None, perturbation: Perturbation) -> None:
        """`dtype`: that of the layers; None, or one of 16 bits: nothing is noted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype if dtype in (torch.float32, torch.float64) else None
        self.perturbation = perturbation
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.dtype is None or func.overloadpacket.__name__ not in CASTS or not isinstance(result, Tensor):
            return result
        given = args[1 if func.overloadpacket.__name__ == "copy_" else 0]
        if not isinstance(given, Tensor) or given.dtype != self.dtype or not _is_narrower(result, given):
            return result
        self.found = True
        perturbed = self.perturbation.perturb(result)
        return result if perturbed is result else result.copy_(perturbed)


def _is_narrower(result: Tensor, given: Tensor) -> bool:
    return result.is_floating_point() and result.dtype.itemsize < given.dtype.itemsize
