"""Layers by name, the nested values of tensors that layers exchange, and the dtypes of precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plait.errors import DataError, PlanError
from plait.plan.argument_checks import require_whole
from plait.plan.parameter_units import PRECISIONS, Dtype
from plait.plan.plan import Precision

Value: TypeAlias = Any
"""A tensor, or a tuple, list or dictionary of values; any other object is passed on unchanged."""


@dataclass(frozen=True, eq=False)
class Microbatches:
    """A batch that the user has split already: one value per micro-batch, each with its own shapes.

    `engine.forward_backward(Microbatches([x0, x1]), Microbatches([y0, y1]))` runs `x0` and `x1`
    as the two micro-batches of a step. Dim 0 of their tensors need not be a batch.
    """

    values: tuple[Value, ...]

    def __init__(self, values: Iterable[Value]) -> None:
        if isinstance(values, Tensor | dict):
            raise DataError(
                f"Microbatches was given a {type(values).__name__}: give a list, one per micro-batch."
            )
        object.__setattr__(self, "values", tuple(values))


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


def row_count(value: Value, what: str) -> int:
    """Return the number of rows of a batch: the size of dim 0, which all of its tensors share.

    Raises DataError where the tensors differ in it, and where no row has an element.
    """
    tensors = [*tensors_of(value)]
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1:
        raise DataError(
            f"the {what} have {sorted(rows)} rows: give tensors that share their dim 0, the batch."
        )
    count = rows.pop()
    if count and not tensors[0].numel() and not any(tensor.numel() for tensor in tensors):
        raise DataError(
            f"the {what} have {count} rows without an element, of shape {list(tensors[0].shape)}: give rows "
            "of at least one position."
        )
    return count


def split(value: Value, microbatches: int, what: str) -> list[Value]:
    """Return views of `value`, split along dim 0 of its tensors into `microbatches` equal parts.

    PlanError where dim 0 is not divisible, DataError where the tensors differ in dim 0, or where the value is
    split already.
    """
    if isinstance(value, Microbatches):
        raise DataError(
            f"the {what} are Microbatches, which only forward_backward, evaluate and output of an engine "
            "take: give a batch whose dim 0 can be cut."
        )
    count = row_count(value, what)
    if count == 0 or count % microbatches:
        raise PlanError(
            f"the {what} have {count} rows, which do not divide into {microbatches} micro-batches: "
            f"give a multiple of {microbatches} rows or change plan.microbatches."
        )
    size = count // microbatches
    return [_rows(value, start, start + size) for start in range(0, count, size)]


def _rows(value: Value, start: int, stop: int) -> Value:
    """Return views of the rows `start` to `stop` of the tensors in `value`."""
    return map_tensors(lambda tensor: tensor[start:stop], value)


def split_both(
    inputs: Value, targets: Value, microbatches: int, convert: Sequence[Callable[[Value], Value]]
) -> list[list[Value]]:
    """Return the micro-batches of inputs and targets: the items of `Microbatches`, or the results of `split`.

    `convert` converts the inputs and the targets. PlanError for another number of
    micro-batches, DataError where one of the two is split already and the other is not; and as `split`.
    """
    given = {"inputs": inputs, "targets": targets}
    whole = [what for what, value in given.items() if not isinstance(value, Microbatches)]
    if len(whole) == 1:
        raise DataError(
            f"the {whole[0]} are not Microbatches, but the others are: give both cut, or both whole."
        )
    both = zip(given.items(), convert, strict=True)
    return [split_one(value, what, microbatches, own) for (what, value), own in both]


def split_one(value: Value, what: str, microbatches: int, convert: Callable[[Value], Value]) -> list[Value]:
    """Return the converted micro-batches of one value: items of `Microbatches`, or results of `split`.

    Raises PlanError for another number of micro-batches; and as `split`.
    """
    if not isinstance(value, Microbatches):
        return split(convert(value), microbatches, what)
    if len(value.values) != microbatches:
        raise PlanError(
            f"the {what} are {len(value.values)} micro-batches, but the plan runs {microbatches} a step: "
            "give as many, or change plan.microbatches."
        )
    return [convert(one) for one in value.values]


def counted_microbatches(
    inputs: Value, targets: Value, microbatches: int, rows: int | None
) -> tuple[Value, Value, int]:
    """Return inputs and targets in micro-batches, and how many of the first ones count.

    `rows`: how many rows of the batch count, from the first on; None: all. They are cut into micro-batches of
    about equal size; where there are fewer rows than micro-batches, the others hold the first row again, and
    do not count. `Microbatches`, and rows that micro-batches divide evenly, are returned as they are. Targets
    may have several rows for each of the inputs. DataError where there are no rows, or fewer than `rows`.
    """
    if isinstance(inputs, Microbatches) or isinstance(targets, Microbatches):
        if rows is not None:
            raise DataError(
                f"rows = {rows} is given with Microbatches, whose tensors need not have rows: give a batch "
                "whose dim 0 can be cut, or leave rows out."
            )
        return inputs, targets, microbatches
    if rows is not None:
        require_whole("rows", rows, DataError, least=0)
    given, of_targets = row_count(inputs, "inputs"), row_count(targets, "targets")
    counting = given if rows is None else rows
    if given and counting == given and given % microbatches == of_targets % microbatches == 0:
        return inputs, targets, microbatches
    if not 0 <= counting <= given or not given or of_targets % given:
        raise DataError(
            f"{counting} rows of inputs of {given} rows and targets of {of_targets} are to count: give at "
            "least one row, targets for each, and rows = 0 on a rank whose rows do not count."
        )
    counted = min(counting, microbatches)
    bounds = [(number * counting // counted, (number + 1) * counting // counted) for number in range(counted)]
    bounds += [(0, 1)] * (microbatches - counted)
    times = of_targets // given
    cut = Microbatches(_rows(inputs, *each) for each in bounds)
    return cut, Microbatches(_rows(targets, times * begin, times * end) for begin, end in bounds), counted


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


RunOnParts = Callable[[nn.Module, Value, int], tuple[Value, int]]
"""Runs a module between layers that exchange parts of a sequence; see `NamedLayer.run`."""


@dataclass(frozen=True)
class NamedLayer:
    """A layer and its path in the model, as in `named_modules`."""

    path: str
    module: nn.Module
    run_on_parts: RunOnParts | None = None
    """With sequence parallelism: how the module runs where its input or output is a part of a sequence."""

    def run(self, value: Value, length: int) -> tuple[Value, int]:
        """Return the layer's output, and the whole sequence length to pass to the next layer as `length`.

        `length`: the length of the sequence of which `value` holds a part; 0 if it is not in parts yet.
        """
        if self.run_on_parts is None:
            return self.module(value), length
        return self.run_on_parts(self.module, value, length)


DTYPES: dict[Precision | None, torch.dtype | None] = {
    None: None,
    **{precision: getattr(torch, dtype.name) for precision, dtype in PRECISIONS.items()},
}
"""None: the dtype of the model's own tensor."""


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the `torch.dtype` that has the name of `dtype`."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def named_dtype(dtype: torch.dtype) -> Dtype:
    """Return the name and the element size in bytes of a `torch.dtype`: inverse of `torch_dtype`."""
    return Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)


def convert(value: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return a copy of `value` on `device`; floating-point values are converted to `dtype`, if given."""
    kept = value.dtype if dtype is None or not value.is_floating_point() else dtype
    return torch.empty_like(value, device=device, dtype=kept).copy_(value)
