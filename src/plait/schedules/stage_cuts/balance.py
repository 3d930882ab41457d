"""Cutting a sequence of layers into stages of even cost."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm

from plait.errors import PlanError


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the number of consecutive layers in each of `parts` stages of even cost, at least one each.

    The cost of the most expensive stage is least; among such cuts the sum of squared stage costs is least,
    and among those the earlier stages have more layers: `balance([1, 1, 1, 1, 1], 2)` is `(3, 2)`. `costs`
    has one number per layer, of any unit; sums are compared without rounding, in O(parts · layers²) steps.
    Raises `PlanError` for more stages than layers, and for a cost that is negative or not finite.
    """
    if parts < 1:
        raise PlanError(f"{len(costs)} layers cannot be cut into {parts} stages: give at least 1 stage.")
    if parts > len(costs):
        raise PlanError(
            f"{parts} stages need at least {parts} layers, but the model has {len(costs)}: "
            "lower pp or chunks, or make the model deeper."
        )
    for layer, cost in enumerate(costs):
        if not (isfinite(cost) and cost >= 0):
            raise PlanError(f"the cost of layer {layer} is {cost}: give a finite number of at least 0.")
    total = _exact_sums(costs)
    return _evenest(total, parts, limit=_least_peak(total, parts))


def _exact_sums(costs: Sequence[float]) -> list[int]:
    """Return the cost of the first 0, 1, 2 … layers, in integer multiples of a common unit."""
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    return list(accumulate((int(cost * unit) for cost in exact), initial=0))


def _least_peak(total: Sequence[int], parts: int) -> int:
    """Return the minimum over all cuts of the cost of the most expensive stage."""
    layers = len(total) - 1
    peak = [total[-1] - before for before in total[:-1]]  # for the layers from each one on, as one stage
    for stages in range(2, parts + 1):
        peak = [
            min(max(total[cut] - total[first], peak[cut]) for cut in range(first + 1, layers - stages + 2))
            for first in range(layers - stages + 1)
        ]
    return peak[0]


def _evenest(total: Sequence[int], parts: int, limit: int) -> tuple[int, ...]:
    """Return the layers per stage with the least sum of squared stage costs, none of them above `limit`."""
    layers = len(total) - 1
    never = total[-1] ** 2 + 1  # more than any sum of squares

    def square(first: int, cut: int) -> int:
        cost = total[cut] - total[first]
        return cost * cost if cost <= limit else never

    least = [
        square(first, layers) for first in range(layers)
    ]  # for the layers from each one on, as one stage
    choices: list[list[int]] = []  # per number of stages and first layer: where the first of the stages ends
    for stages in range(2, parts + 1):
        ends, sums = [], []
        for first in range(layers - stages + 1):
            # From the back, so that of equal cuts the latest is taken.
            found = [(square(first, cut) + least[cut], cut) for cut in range(layers - stages + 1, first, -1)]
            best, end = min(found, key=lambda pair: pair[0])
            ends.append(end)
            sums.append(best)
        least = sums
        choices.append(ends)
    cuts = [0]
    for ends in reversed(choices):
        cuts.append(ends[cuts[-1]])
    return tuple(stop - start for start, stop in zip(cuts, [*cuts[1:], layers], strict=True))
