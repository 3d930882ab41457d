"""Cutting a sequence of layers into stages of even cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

from plait.errors import PlanError


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the number of consecutive layers in each of `parts` stages of even cost, at least one each.

    The cost of the most expensive stage is least; among such cuts the sum of squared stage costs is least,
    and among those the earlier stages have more layers: `balance([1, 1, 1, 1, 1], 2)` is `(3, 2)`. `costs`
    has one number per layer, of any unit; sums are compared without rounding. Raises `PlanError` for more
    stages than layers, and for a cost that is negative or not finite.
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
    """Return the minimum over all cuts of the cost of the most expensive stage, found by bisection."""
    low = max(after - before for before, after in pairwise(total))
    low, high = max(low, -(-total[-1] // parts)), total[-1]
    while low < high:
        middle = (low + high) // 2
        if _reach(total, parts, middle)[-1] == len(total) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _reach(total: Sequence[int], parts: int, limit: int) -> list[int]:
    """Return how many layers 0, 1, 2 … stages hold at most, none of them above `limit`."""
    reach = [0]
    for _ in range(parts):
        reach.append(bisect_right(total, total[reach[-1]] + limit) - 1)
    return reach


def _evenest(total: Sequence[int], parts: int, limit: int) -> tuple[int, ...]:
    """Return the layers per stage with the least sum of squared stage costs, none of them above `limit`."""
    layers = len(total) - 1
    most = _reach(total, parts, limit)
    latest = [min(reached, layers - parts + stages) for stages, reached in enumerate(most)]
    least = {layers: 0}  # by the first layer of the stages behind: their sum of squares
    choices: list[dict[int, int]] = []  # by the first layer of a stage, last stage first: where it ends
    for stage in reversed(range(parts)):
        sums, ends = dict[int, int](), dict[int, int]()
        for first in range(stage, latest[stage] + 1):
            stop = min(bisect_right(total, total[first] + limit) - 1, latest[stage + 1])
            # From the back, so that of equal cuts the latest is taken.
            found = [
                ((total[end] - total[first]) ** 2 + least[end], -end)
                for end in range(stop, first, -1)
                if end in least
            ]
            if found:
                sums[first], end = min(found)
                ends[first] = -end
        least = sums
        choices.append(ends)
    cuts = [0]
    for ends in reversed(choices):
        cuts.append(ends[cuts[-1]])
    return tuple(stop - start for start, stop in pairwise(cuts))
