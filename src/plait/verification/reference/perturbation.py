"""Artificial rounding errors, by which the possible deviation of correct runs is measured.

Another order of sums gives other rounding errors. How large they grow depends on the model, so it is
measured: the reference runs again with a random error of the size of rounding in every parameter, every
tensor between two layers and every gradient of one (Monte Carlo arithmetic: Parker 1997).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Perturbation:
    """Adds random rounding errors to tensors, seeded with `number`; number 0 adds none."""

    number: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.number)

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
