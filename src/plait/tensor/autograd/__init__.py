"""Autograd functions: deferred weight gradients, differentiable collectives, layout-independent dropout."""

from typing import Any

from plait.package import submodule
from plait.tensor.autograd.split_backward import SplitBackward

__all__ = ["SplitBackward"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
