"""How units keep parameters and gradients: what a plan says, as dtypes and devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StoragePolicy:
    """Of one rank. A dtype of None is that of the parameter itself."""

    device: torch.device
    """Where layers run."""
    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    gradient: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cuts: bool = False
    """Whether the optimizer updates pieces, or offloaded copies, of what layers use."""
    keeps_parameters: bool = True
    """Whether parameters stay whole between the layers that use them."""
    keeps_gradients: bool = True
    """Whether gradients stay whole between the layers that add to them."""
    offloads_parameters: bool = False
    """Whether pieces lie on the CPU while a step runs; in between they are where their gradients are."""
    offloads_gradients: bool = False
    """Whether final gradients lie on the CPU, and so the optimizer's state and what it updates."""

    @property
    def home(self) -> torch.device:
        """Where the pieces of parameters lie while a step runs."""
        return CPU if self.offloads_parameters else self.device

    @property
    def gradient_home(self) -> torch.device:
        """Where final gradients lie."""
        return CPU if self.offloads_gradients else self.device

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What layers compute with."""
        return self._or(self.compute, parameter.dtype, parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What the optimizer updates; nobody updates what is frozen."""
        dtype = self.dtype_of(parameter)
        return self._or(self.master, dtype, parameter) if parameter.requires_grad else dtype

    def gradient_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What gradients are added up in."""
        return self._or(self.gradient, self.master_of(parameter), parameter)

    def reduce_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What gradients travel in."""
        return self._or(self.reduce, self.gradient_of(parameter), parameter)

    @staticmethod
    def _or(told: torch.dtype | None, otherwise: torch.dtype, parameter: nn.Parameter) -> torch.dtype:
        return otherwise if told is None or not parameter.is_floating_point() else told
