"""Artificial rounding errors in a reference run, by which tolerances are measured.

Another order of sums gives other rounding errors. How large they grow depends on the model, so it is
measured: the reference runs again with a random error of the size of rounding in every parameter, every
tensor between two layers and every gradient of one (Monte Carlo arithmetic: Parker 1997).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CASTS = frozenset(
    {"_to_copy", "copy_", "sum", "mean", "prod", "cumsum", "cumprod", "_softmax", "_log_softmax"}
)
"""ATen operations that may return another dtype than they are given."""


class Perturbation:
    """Adds random rounding errors to tensors, seeded with `number`; number 0 adds none."""

    def __init__(self, number: int) -> None:
        self.number, self.generator = number, torch.Generator().manual_seed(number)

    def perturb(self, tensor: Tensor) -> Tensor:
        """Return `tensor` plus random errors, scaled by each element's magnitude plus the median magnitude.

        The median accounts for sums that cancel, whose error is that of their summands; unlike a mean it is
        not dominated by a few elements (the -1e9 of a mask).
        """
        if not self.number or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        epsilon = torch.finfo(tensor.dtype).eps
        wide = tensor.detach().double().abs()
        size = wide.where(wide.isfinite(), 0.0)
        size = size + size.median()
        if tensor.dtype == torch.float16:  # its spacing is constant below the smallest normal number
            size = size.clamp(min=torch.finfo(tensor.dtype).smallest_normal).where(size > 0, 0.0)
        return tensor + (size * epsilon * self._signed(tensor)).to(tensor.dtype)

    def perturb_elementwise(self, tensor: Tensor, epsilon: float | None = None) -> Tensor:
        """Return `tensor` with a random error of relative size up to `epsilon` in each element."""
        if not self.number or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        epsilon = torch.finfo(tensor.dtype).eps if epsilon is None else epsilon
        return tensor + (tensor.detach().double() * epsilon * self._signed(tensor)).to(tensor.dtype)

    def _signed(self, tensor: Tensor) -> Tensor:
        """Return uniform random numbers in [-1, 1), float64, of the shape of `tensor`."""
        random = torch.rand(tensor.shape, dtype=torch.float64, generator=self.generator)
        return random.mul_(2).sub_(1).to(tensor.device)


class NarrowingCasts(TorchDispatchMode):
    """Context: records casts to a narrower dtype, and adds rounding errors to their results.

    As does a norm that computes in float32 in a model in float64: what is computed behind such a cast has the
    rounding errors of the narrower dtype.
    """

    def __init__(self, dtype: torch.dtype | None, perturbation: Perturbation) -> None:
        """`dtype`: that of the layers; None, or one of 16 bits: nothing is noted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype if dtype in (torch.float32, torch.float64) else None
        self.perturbation = perturbation
        self.found = False
        self._is_noting = True

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Context: casts within it are left unchanged, since they are part of what is computed (float8)."""
        self._is_noting = False
        try:
            yield
        finally:
            self._is_noting = True

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.dtype is None or not self._is_noting:
            return result
        if func.overloadpacket.__name__ not in CASTS or not isinstance(result, Tensor):
            return result
        given = args[1 if func.overloadpacket.__name__ == "copy_" else 0]
        if not isinstance(given, Tensor) or given.dtype != self.dtype:
            return result
        if not result.is_floating_point() or result.dtype.itemsize >= given.dtype.itemsize:
            return result
        self.found = True
        perturbed = self.perturbation.perturb(result)
        return result if perturbed is result else result.copy_(perturbed)
