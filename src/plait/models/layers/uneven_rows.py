"""Batches of any number of rows as micro-batches; with few rows, some do not count. Without gradients."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import DataError
from plait.plan.arguments import require_whole
from plait.tensor.layer_values import Microbatches, Value, map_tensors, row_count


def counted_microbatches(
    inputs: Value, targets: Value, microbatches: int, rows: int | None
) -> tuple[Value, Value, int]:
    """Return inputs and targets in micro-batches, and how many of these count, from the first on.

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
    return _cut(inputs, bounds, 1), _cut(targets, bounds, of_targets // given), counted


def _cut(value: Value, bounds: Sequence[tuple[int, int]], times: int) -> Microbatches:
    """Return rows `bounds[0] * times` to `bounds[1] * times` of `value`."""
    return Microbatches(
        map_tensors(lambda tensor, rows=slice(times * begin, times * end): tensor[rows], value)  # type: ignore[misc]
        for begin, end in bounds
    )
