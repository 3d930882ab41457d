"""An RMS norm over all features of a region, of which each rank of `tp` has some.

    y_t = w_t · x_t / sqrt(Σ_t Σ x_t² / features + eps)        one all-reduce of a number per position

Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from plait.ranks.group import Group
from plait.tensor.autograd.paired_collectives import copy, reduce


class ParallelRMSNorm(nn.Module):
    """An RMS norm whose features are partitioned over `group`: `[..., features / size]` → the same shape.

    Computes in float32 at least. Communication: one all-reduce of the mean squares, one of their gradients.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float | None, group: Group) -> None:
        """`weight`: this rank's shard. `epsilon`: None is that of the dtype in which the norm computes."""
        super().__init__()
        self.weight, self.epsilon, self.group = weight, epsilon, group

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized piece."""
        return partitioned_rms_norm(x, self.weight, self.epsilon, self.group)


def partitioned_rms_norm(x: Tensor, weight: Tensor, epsilon: float | None, group: Group) -> Tensor:
    """Return this rank's piece of the RMS norm of a tensor whose last dim is partitioned in equal pieces.

    Overridable by a `TorchFunctionMode`.
    """
    if has_torch_function_variadic(x, weight):
        replaced: Tensor = handle_torch_function(partitioned_rms_norm, (x, weight), x, weight, epsilon, group)
        return replaced
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if epsilon is None:
        epsilon = torch.finfo(wide.dtype).eps
    mean = copy(reduce(wide.pow(2).mean(-1, keepdim=True), group), group) / group.size
    return (weight * (wide * torch.rsqrt(mean + epsilon))).to(x.dtype)
