"""What a user gave to one module beside its class: hooks, and a `forward` set on the instance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_altered(module: nn.Module) -> bool:
    """Return whether `module` has hooks, or a `forward` set on the instance."""
    return has_own_forward(module) or next(hooks_of(module), None) is not None


def has_own_forward(module: nn.Module) -> bool:
    """Return whether `forward` was set on the instance."""
    return "forward" in vars(module)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of the forward and backward of `module`. Reads private attributes."""
    for kind in _HOOKS:
        yield from getattr(module, kind).values()
