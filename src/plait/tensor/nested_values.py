"""Functions on nested values: tensors in tuples, lists and dictionaries, as layers exchange them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from torch import Tensor

Value: TypeAlias = Any
"""A tensor, or a tuple, list or dictionary of values; any other object is passed on unchanged."""


def tensors_of(value: Value) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from tensors_of(value[key])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def list_of_tensors(value: Value) -> list[Tensor]:
    """Return the tensors in `value`, in the order of `tensors_of`."""
    return [value] if isinstance(value, Tensor) else list(tensors_of(value))


def map_tensors(function: Callable[[Tensor], Any], value: Value) -> Value:
    """Return `value` with `function` applied to each tensor in it."""
    if isinstance(value, Tensor):  # the common case, kept cheap
        return function(value)
    return map_leaves(lambda leaf: isinstance(leaf, Tensor), function, value)


def map_leaves(wanted: Callable[[Any], bool], function: Callable[[Any], Any], value: Value) -> Value:
    """Return `value` with `function` applied to each leaf for which `wanted` is true; copies containers."""
    if wanted(value):
        return function(value)
    if isinstance(value, dict):
        return {key: map_leaves(wanted, function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(wanted, function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(wanted, function, item) for item in value)
    return value


def with_tensors(value: Value, tensors: Iterable[Any]) -> Value:
    """Return `value` with its tensors replaced by `tensors`, in the order of `tensors_of`."""
    given = iter(tensors)
    return map_tensors(lambda _: next(given), value)


def leaf_of(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return `tensor` detached: a leaf on the same memory, with `requires_grad` set."""
    return tensor.detach().requires_grad_(requires_grad)


def detached(value: Value) -> Value:
    """Return `value` with each tensor detached: a leaf on the same memory, with the same `requires_grad`."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def signatures(values: Sequence[Value]) -> str:
    """Return text of the structure, shapes and dtypes of `values`: once if all share them, else of each."""
    each = [signature(value) for value in values]
    if len(set(each)) == 1:
        return each[0]
    every = ", ".join(each)
    return f"{len(set(each))} shapes {blake2b(every.encode(), digest_size=4).hexdigest()} ({every})"


def signature(value: Value) -> str:
    """Return the structure of `value` with the shapes and dtypes of its tensors, as text."""
    return repr(map_tensors(lambda tensor: (tuple(tensor.shape), tensor.dtype), value))
