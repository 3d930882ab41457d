"""`evaluating`: a context manager that puts modules in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Put every module of `layers` in evaluation mode; restore each module's mode at the end."""
    modules = [module for layer in layers for module in layer.modules()]
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
