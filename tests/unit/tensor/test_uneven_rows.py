"""Batches whose rows do not divide, in micro-batches: which rows each has, and how many count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import DataError
from plait.tensor.microbatches import Microbatches, counted_microbatches

CASES: list[tuple[int, int, int | None, list[list[int]], int]] = [
    (5, 2, None, [[0, 1], [2, 3, 4]], 2),
    (5, 3, None, [[0], [1, 2], [3, 4]], 3),
    (6, 3, 4, [[0], [1], [2, 3]], 3),
    (6, 3, 2, [[0], [1], [0]], 2),
    (2, 4, None, [[0], [1], [0], [0]], 2),
    (3, 2, 0, [[0], [0]], 0),
    (4, 2, 3, [[0], [1, 2]], 2),
]
"""Rows that are given, micro-batches, rows that count; the rows of each, and how many count."""


def test_uneven_rows_give_the_first_micro_batches_one_more() -> None:
    """Two rows of targets for each of the inputs."""
    for given, microbatches, rows, expected, counted in CASES:
        inputs, targets = {"x": torch.arange(given)}, torch.arange(2 * given)
        cut, of_targets, count = counted_microbatches(inputs, targets, microbatches, rows)
        assert isinstance(cut, Microbatches)
        assert isinstance(of_targets, Microbatches)
        assert [one["x"].tolist() for one in cut.values] == expected
        twice = [[2 * row + n for row in own for n in (0, 1)] for own in expected]
        assert [one.tolist() for one in of_targets.values] == twice
        assert count == counted


def test_batches_that_divide_evenly_are_returned_unchanged_and_misfitting_ones_refused() -> None:
    inputs, targets = torch.arange(6), torch.arange(12)
    for rows in (None, 6):
        assert counted_microbatches(inputs, targets, 3, rows) == (inputs, targets, 3)
    made = Microbatches([inputs, inputs])
    assert counted_microbatches(made, targets, 2, None) == (made, targets, 2)
    with pytest.raises(DataError, match="rows = 1 is given with Microbatches"):
        counted_microbatches(inputs, Microbatches([targets]), 1, 1)
    wrong: list[tuple[Any, Any, Any, str]] = [
        (inputs, targets, 7, "7 rows of inputs of 6 rows and targets of 12 are to count"),
        (inputs, torch.arange(11), None, "6 rows of inputs of 6 rows and targets of 11"),
        (inputs[:0], targets[:0], None, "0 rows of inputs of 0 rows and targets of 0"),
        (inputs, targets, -1, "rows"),
        (inputs, targets, 1.0, "rows"),
    ]
    for given, of_targets, rows, told in wrong:
        with pytest.raises(DataError, match=told):
            counted_microbatches(given, of_targets, 4, rows)
