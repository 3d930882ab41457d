"""The structure of a layer as a hashable value: equal for layers with equal shapes and operations."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.result_cache import ResultCache

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, type, Enum),
    *(FunctionType, BuiltinFunctionType, torch.dtype, torch.device, torch.memory_format),
)
"""Types whose values never change and compare by value, or, as functions do, by identity."""
_COMMON = frozenset({int, float, bool, str, type(None)})
"""The most frequent of them, found without a look at base classes."""


def structure_of(*modules: nn.Module) -> Hashable:
    """Return a description of modules: types, attributes, shapes and dtypes, and which objects recur in them.

    Modules with equal descriptions give outputs of equal shapes and dtypes for such inputs, and equal
    autograd graphs: parameters and buffers count by shape and dtype only, what a `ResultCache` holds does not
    count. Attributes other than numbers, strings, functions, tensors, modules and containers of these compare
    by identity.
    """
    return _described(modules, {})


class _Same:
    """Wrapper that compares equal only to a wrapper of the same object, which it keeps alive."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _described(thing: Any, numbers: dict[int, int]) -> Hashable:
    """Return a hashable description of `thing`; mutable objects already in `numbers` are given by number."""
    kind = type(thing)
    if kind in _COMMON or isinstance(thing, _PLAIN):
        return kind, thing
    if id(thing) in numbers:
        return "again", numbers[id(thing)]
    if isinstance(thing, nn.Module):
        numbers[id(thing)] = len(numbers)
        return kind, _items(vars(thing), numbers)
    if isinstance(thing, Tensor):
        numbers[id(thing)] = len(numbers)
        own = _items(vars(thing), numbers) if vars(thing) else ()
        return kind, tuple(thing.shape), thing.stride(), thing.dtype, thing.requires_grad, own
    if isinstance(thing, ResultCache):
        numbers[id(thing)] = len(numbers)
        return (kind,)
    if isinstance(thing, tuple):
        numbers[id(thing)] = len(numbers)
        return kind, tuple(_described(item, numbers) for item in thing)
    if isinstance(thing, set | frozenset):
        return kind, frozenset(_described(item, numbers) for item in thing)
    if isinstance(thing, list | dict):
        numbers[id(thing)] = len(numbers)
        items = thing if isinstance(thing, dict) else dict(enumerate(thing))
        return kind, _items(items, numbers)
    return _Same(thing)


def _items(items: dict[Any, Any], numbers: dict[int, int]) -> Hashable:
    return tuple((_described(key, numbers), _described(value, numbers)) for key, value in items.items())
