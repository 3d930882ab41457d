"""What flows between layers: a tensor, or tuples, lists and dictionaries of tensors and other things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor

from plait.errors import DataError, PlanError

Value: TypeAlias = Any
"""A tensor, or a tuple, list or dictionary of values; anything else passes through untouched."""


def tensors_of(value: Value) -> Iterator[Tensor]:
    """The tensors in `value`, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from tensors_of(value[key])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def map_tensors(function: Callable[[Tensor], Any], value: Value) -> Value:
    """`value` with `function` applied to each tensor, in the order of `tensors_of`."""
    return map_leaves(lambda leaf: isinstance(leaf, Tensor), function, value)


def map_leaves(wanted: Callable[[Any], bool], function: Callable[[Any], Any], value: Value) -> Value:
    """`value` with `function` applied to what is `wanted`; containers are made anew, the rest is kept."""
    if wanted(value):
        return function(value)
    if isinstance(value, dict):
        return {key: map_leaves(wanted, function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(wanted, function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(wanted, function, item) for item in value)
    return value


def split(value: Value, microbatches: int, what: str) -> list[Value]:
    """`value` cut along dim 0 of its tensors into `microbatches` equal parts (views, nothing is copied).

    PlanError when a dim 0 is not divisible, DataError when the tensors disagree about dim 0.
    """
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(value)}
    if len(rows) != 1:
        raise DataError(
            f"the {what} have {sorted(rows)} rows: give tensors that share their dim 0, the batch."
        )
    (count,) = rows
    if count == 0 or count % microbatches:
        raise PlanError(
            f"the {what} have {count} rows, which do not divide into {microbatches} micro-batches: "
            f"give a multiple of {microbatches} rows or change plan.microbatches."
        )
    size = count // microbatches
    return [
        map_tensors(lambda tensor, start=start: tensor[start : start + size], value)  # type: ignore[misc]
        for start in range(0, count, size)
    ]


def leaf_of(tensor: Tensor, requires_grad: bool) -> Tensor:
    """`tensor` cut off from its graph: the same memory, and a leaf whose gradient is collected if asked."""
    return tensor.detach().requires_grad_(requires_grad)


def signature(value: Value) -> str:
    """The structure of `value` with the shapes and dtypes of its tensors, to tell values of one kind."""
    return repr(map_tensors(lambda tensor: (tuple(tensor.shape), tensor.dtype), value))
