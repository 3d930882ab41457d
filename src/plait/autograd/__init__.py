"""Autograd functions: weight gradients kept for later, and collectives with a gradient, in pairs."""

from plait.autograd.split_backward import SplitBackward

__all__ = ["SplitBackward"]
