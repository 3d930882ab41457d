"""Autograd functions: deferred weight gradients, differentiable collectives, layout-independent dropout."""

from plait.autograd.split_backward import SplitBackward

__all__ = ["SplitBackward"]
