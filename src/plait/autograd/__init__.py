"""Autograd functions: deferred weight gradients, differentiable collectives, layout-independent dropout."""

from typing import Any

from plait.autograd.split_backward import SplitBackward
from plait.submodules import submodule

__all__ = ["SplitBackward"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
