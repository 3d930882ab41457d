"""Splits a batch into micro-batches along its rows; `Microbatches`, a batch that is split already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.errors import DataError, PlanError
from plait.plan.argument_checks import require_whole
from plait.tensor.nested_values import Value, map_tensors, tensors_of


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
