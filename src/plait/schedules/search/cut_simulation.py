"""Makespans of a schedule for many cuts of the model into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import frexp, ldexp
from operator import add
from typing import NamedTuple

from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import Timing
from plait.schedules.schedule import Schedule
from plait.schedules.search.layer_costs import LayerCosts

BITS = 40
"""Bits of the largest cost of a layer on the grid of a simulation."""


class _RankActions(NamedTuple):
    """What a lower bound of the makespan reads of a rank's actions."""

    first: int
    """Stage of the first forward."""
    last: int
    """Stage of the last input gradient."""
    stages: list[tuple[int, tuple[int, int, int], int]]
    """Each with its forwards, input and weight gradients until then, and its weight gradients after."""


def _rank_actions(row: Sequence[Action]) -> _RankActions:
    final = max(at for at, action in enumerate(row) if action.kind in (Kind.I, Kind.B))
    before, after = (
        Counter((one.stage, one.kind) for one in part) for part in (row[: final + 1], row[final + 1 :])
    )
    stages = []
    for stage in sorted({one.stage for one in row}):
        forward, inputs, weights, both = (before[stage, kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
        stages.append((stage, (forward, inputs + both, weights + both), after[stage, Kind.W]))
    return _RankActions(row[0].stage, row[final].stage, stages)


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
        forward, inputs, weights = self._durations(cut)
        both = [first + second for first, second in zip(inputs, weights, strict=True)]
        durations = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both}
        return max(self.schedule.event_order.last_ends(Timing(durations, [0, *self._hops], [*self._hops, 0])))

    def least(self, cut: Sequence[int]) -> int:
        """Return a lower bound of `makespan`, without a simulation.

        A rank's first forward follows those of all stages before; after its last input gradient come those of
        the stages before, while the rank does what it has left.
        """
        forward, inputs, weights = self._durations(cut)
        starts = list(accumulate(map(add, forward, [*self._hops, 0]), initial=0))
        ends = list(accumulate(map(add, inputs, [*self._hops, 0]), initial=0))
        found = 0
        for rank in self._ranks:
            before = after = 0
            for stage, first, rest in rank.stages:
                before += first[0] * forward[stage] + first[1] * inputs[stage] + first[2] * weights[stage]
                after += rest * weights[stage]
            found = max(found, starts[rank.first] + before + max(after, ends[rank.last]))
        return found

    def _durations(self, cut: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the durations of forwards, input gradients and weight gradients of each stage."""
        bounds = list(pairwise([0, *accumulate(cut)]))
        forward, inputs, weights = (
            [whole[stop] - whole[start] for start, stop in bounds] for whole in self._sums
        )
        message = self._on_grid(self.costs.message)
        return [time + message for time in forward], [time + message for time in inputs], weights

    @cached_property
    def _ranks(self) -> list[_RankActions]:
        return [_rank_actions(row) for row in self.schedule.actions]

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
