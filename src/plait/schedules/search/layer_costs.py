"""Costs of the layers of a model, and cuts of layers into stages of about the same cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

from plait.errors import PlanError
from plait.schedules.costs import Costs

HOP, MESSAGE = 0.01, 0.0025
"""Message times as parts of a rank's work on a micro-batch, measured on two ranks of a host with Gloo."""


@dataclass(frozen=True)
class LayerCosts:
    """The time of each layer's forward, input gradient and weight gradient, and of messages, in one unit."""

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 (the field's letter)
    W: tuple[float, ...]
    comm: float = 0
    """A message between ranks, which blocks neither."""
    message: float = 0
    """Time to send and receive that blocks a rank, for each forward and input gradient."""

    @classmethod
    def evenly(cls, costs: Sequence[float]) -> LayerCosts:
        """Return assumed costs, without measurements: `F`, `I` and `W` take a third of each layer's cost."""
        thirds = tuple(cost / 3 for cost in costs)
        return cls(thirds, thirds, thirds)

    def in_input_gradient(self, layer: int, cost: float) -> LayerCosts:
        """Return a copy in which `cost`, a part of a layer's total, all belongs to the layer's `I`."""
        part = min(cost, self.total[layer]) / 3
        forward, inputs, weights = list(self.F), list(self.I), list(self.W)
        forward[layer] -= part
        inputs[layer] += 2 * part
        weights[layer] -= part
        return replace(self, F=tuple(forward), I=tuple(inputs), W=tuple(weights))

    def with_messages(self, ranks: int) -> LayerCosts:
        """Return a copy whose message times are estimated as fixed fractions of a rank's mean work."""
        work = sum(self.total) / ranks
        return replace(self, comm=HOP * work, message=MESSAGE * work)

    @property
    def total(self) -> tuple[float, ...]:
        """Cost of each layer, `F + I + W`."""
        return tuple(map(sum, zip(self.F, self.I, self.W, strict=True)))

    def of_stages(self, cut: Sequence[int]) -> Costs:
        """Return the costs of stages; `cut` has the number of layers of each."""
        return Costs(
            F=_sums(self.F, cut, self.message),
            I=_sums(self.I, cut, self.message),
            W=_sums(self.W, cut, 0),
            comm=self.comm,
        )


def _sums(costs: Sequence[float], cut: Sequence[int], extra: float) -> list[float]:
    stops = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [extra + sum(costs[stop - count : stop]) for stop, count in zip(stops, cut, strict=True)]


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
