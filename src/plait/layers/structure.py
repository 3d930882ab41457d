"""The structure of a layer as a hashable value: equal for layers with equal shapes and operations."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, type, Enum),
    *(FunctionType, BuiltinFunctionType, torch.dtype, torch.device, torch.memory_format),
)
"""Types whose values never change and compare by value, or, as functions do, by identity."""

_HEAP_TYPE = 1 << 9
"""Flag of classes that are made at run time, as those written in Python are."""


def structure_of(module: nn.Module) -> Hashable:
    """Return a description of `module`: types, attributes, shapes and dtypes, and repeated objects.

    Modules with equal descriptions give outputs of equal shapes and dtypes for such inputs, and equal
    autograd graphs: parameters and buffers count by shape and dtype only. Functions compare by identity, as
    do objects whose state is not all in their `__dict__`.
    """
    return _described(module, {})


class _Same:
    """Compares equal only for the same object, which it keeps alive."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _described(thing: Any, numbers: dict[int, int]) -> Hashable:
    """Describe `thing`; `numbers` has the mutable objects seen so far, which are described by number."""
    if isinstance(thing, _PLAIN):
        return type(thing), thing
    if id(thing) in numbers:
        return "again", numbers[id(thing)]
    if isinstance(thing, nn.Module):
        numbers[id(thing)] = len(numbers)
        return type(thing), _items(vars(thing), numbers)
    if isinstance(thing, Tensor):
        numbers[id(thing)] = len(numbers)
        return type(thing), tuple(thing.shape), thing.stride(), thing.dtype, thing.requires_grad
    if isinstance(thing, tuple):
        return type(thing), tuple(_described(item, numbers) for item in thing)
    if isinstance(thing, set | frozenset):
        return type(thing), frozenset(_described(item, numbers) for item in thing)
    if isinstance(thing, list | dict):
        numbers[id(thing)] = len(numbers)
        items = thing if isinstance(thing, dict) else dict(enumerate(thing))
        return type(thing), _items(items, numbers)
    if _is_plain_object(thing):
        numbers[id(thing)] = len(numbers)
        return type(thing), _items(vars(thing), numbers)
    return _Same(thing)


def _is_plain_object(thing: object) -> bool:
    """Return whether all state of `thing` is in its `__dict__`, by the rule of pickle, for a Python class."""
    kind = type(thing)
    in_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
    has_slots = any("__slots__" in vars(base) for base in kind.__mro__)
    as_object = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return in_python and as_object and not has_slots and hasattr(thing, "__dict__") and not callable(thing)


def _items(items: dict[Any, Any], numbers: dict[int, int]) -> Hashable:
    return tuple((_described(key, numbers), _described(value, numbers)) for key, value in items.items())
