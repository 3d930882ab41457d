"""Rounding errors of one's own making: how far off is a result that is as good as the reference?

Another order of sums gives other rounding errors. How large they become at the end depends on the model, so
it is measured: the reference runs again with every parameter, every tensor between two layers and every
gradient of one shaken by as much as a rounding error is worth (Monte Carlo arithmetic: Parker 1997).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Perturbation:
    """A source of rounding errors; number 0 makes none."""

    number: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.number)

    def perturb(self, tensor: Tensor) -> Tensor:
        """`tensor` with an error in each element: relative to itself, and to the usual size of all.

        The second part stands for sums that cancel: their error is that of the summands. The usual size is
        the median, so that a few elements (the -1e9 of a mask) do not drown the others.
        """
        if not self.number or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        epsilon = torch.finfo(tensor.dtype).eps
        wide = tensor.detach().double().abs()
        size = wide.where(wide.isfinite(), 0.0)
        size = size + size.median()
        if tensor.dtype == torch.float16:  # whose numbers are no denser below the smallest normal one
            size = size.clamp(min=torch.finfo(tensor.dtype).smallest_normal).where(size > 0, 0.0)
        return tensor + (size * epsilon * self._signed(tensor)).to(tensor.dtype)

    def perturb_elementwise(self, tensor: Tensor, epsilon: float | None = None) -> Tensor:
        """`tensor` with an error in each element relative to itself: its dtype's `epsilon` unless given."""
        if not self.number or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        epsilon = torch.finfo(tensor.dtype).eps if epsilon is None else epsilon
        return tensor + (tensor.detach().double() * epsilon * self._signed(tensor)).to(tensor.dtype)

    def _signed(self, tensor: Tensor) -> Tensor:
        """Random numbers from -1 to 1, float64, one for each element."""
        random = torch.rand(tensor.shape, dtype=torch.float64, generator=self.generator)
        return random.mul_(2).sub_(1).to(tensor.device)
