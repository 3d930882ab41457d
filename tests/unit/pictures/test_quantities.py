"""Numbers as text, and the round numbers of an axis."""

from __future__ import annotations

import pytest

from plait.pictures.quantities import round_numbers


@pytest.mark.parametrize(
    ("low", "high", "at_most", "numbers"),
    [
        (0, 33, 7, [0, 5, 10, 15, 20, 25, 30]),
        (0, 33, 6, [0, 10, 20, 30]),
        (0, 1, 6, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 98.4, 2, [0, 50]),
        (0, 1e-6, 3, [0, 5e-7, 1e-6]),
        (7, 18, 4, [10, 15]),
        (5, 5, 5, [5]),
    ],
)
def test_an_axis_has_round_evenly_spaced_numbers(
    low: float, high: float, at_most: int, numbers: list[float]
) -> None:
    assert round_numbers(low, high, at_most) == pytest.approx(numbers)
