"""Makespans of a schedule for many cuts of the model into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import frexp, ldexp

from plait.schedules.action import Kind
from plait.schedules.event_simulation import Timing
from plait.schedules.schedule import Schedule
from plait.schedules.stage_cuts.layer_costs import LayerCosts

BITS = 40
"""Bits of the largest cost of a layer on the grid of a simulation."""


@dataclass(frozen=True)
class CutSimulation:
    """Simulates `schedule` with the costs of its stages for one cut after the other.

    Costs are rounded to a binary grid, 2⁻⁴⁰ of the largest: sums are exact, and stages of equal layers cost
    exactly the same. Whole numbers below 2⁴⁰ stay what they are.
    """

    costs: LayerCosts
    schedule: Schedule

    def makespan(self, cut: Sequence[int]) -> int:
        """Return the makespan in units of the grid; `cut` has the number of layers of each stage."""
        bounds = [0, *accumulate(cut)]
        forward, inputs, weights = (
            [whole[stop] - whole[start] for start, stop in pairwise(bounds)] for whole in self._sums
        )
        message = self._on_grid(self.costs.message)
        forward = [time + message for time in forward]
        inputs = [time + message for time in inputs]
        both = [first + second for first, second in zip(inputs, weights, strict=True)]
        durations = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both}
        return max(self.schedule.event_order.last_ends(Timing(durations, [0, *self._hops], [*self._hops, 0])))

    @cached_property
    def _hops(self) -> list[int]:
        comm = self._on_grid(self.costs.comm)
        return [0 if here == there else comm for here, there in pairwise(self.schedule.rank_of)]

    @cached_property
    def _sums(self) -> tuple[list[int], ...]:
        """Costs of the first 0, 1, 2 … layers, by kind of work."""
        kinds = (self.costs.F, self.costs.I, self.costs.W)
        return tuple(list(accumulate(map(self._on_grid, kind), initial=0)) for kind in kinds)

    @cached_property
    def _exponent(self) -> int:
        largest = max((*self.costs.F, *self.costs.I, *self.costs.W))
        return BITS - frexp(largest)[1]

    def _on_grid(self, cost: float) -> int:
        numerator, denominator = ldexp(cost, self._exponent).as_integer_ratio()
        return (2 * numerator + denominator) // (2 * denominator)
