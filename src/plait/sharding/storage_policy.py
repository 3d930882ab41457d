"""How units store parameters and gradients under a plan: dtypes and flags."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class StoragePolicy:
    """Precision, sharding and offload of parameters and gradients. None is the parameter's own dtype."""

    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    gradient: torch.dtype | None = None
    reduce: torch.dtype | None = None
    shards: bool = False
    """Whether the optimizer updates pieces, or offloaded copies, of the parameters that layers use."""
    keeps_parameters: bool = True
    """Whether whole parameters stay allocated between the layers that use them."""
    keeps_gradients: bool = True
    """Whether whole gradients stay allocated between the layers that add to them."""
    offloads_parameters: bool = False
    """Whether pieces are on the CPU during a step. Between steps they are where their gradients are."""
    offloads_gradients: bool = False
    """Whether reduced gradients are on the CPU, and so the optimizer's state and the pieces between steps."""

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype that layers compute with."""
        return self._or(self.compute, parameter.dtype, parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the optimizer's copy; for a frozen parameter, the dtype of the layers."""
        dtype = self.dtype_of(parameter)
        return self._or(self.master, dtype, parameter) if parameter.requires_grad else dtype

    def gradient_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype that gradients are accumulated in."""
        return self._or(self.gradient, self.master_of(parameter), parameter)

    def reduce_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype that gradients are reduced in."""
        return self._or(self.reduce, self.gradient_of(parameter), parameter)

    @staticmethod
    def _or(asked: torch.dtype | None, default: torch.dtype, parameter: nn.Parameter) -> torch.dtype:
        return default if asked is None or not parameter.is_floating_point() else asked
