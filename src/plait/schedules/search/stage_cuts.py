"""The joint choice of a step's schedule and of the cut of the model into stages.

Stages of even cost are not always best: in a short step the first and last stages also pay for filling and
draining the pipeline. So the even cut is only the start of the search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import frexp, ldexp
from operator import add
from typing import NamedTuple

from plait.errors import PlanError, ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import Timing
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import AUTO, default_chunks, schedule
from plait.schedules.search.auto import chunk_counts
from plait.schedules.search.layer_costs import LayerCosts, balance
from plait.schedules.timed_schedule import simulated

BITS = 40
"""Bits of the largest cost of a layer on the grid of a simulation."""
MOST_ACTIONS = 1 << 17
"""Actions simulated in one search, so that it takes a tenth of a second or so."""
StageCut = tuple[int, ...]
"""Number of layers per stage, first stage first."""


class _RankActions(NamedTuple):
    """The numbers of a rank's actions from which a lower bound of the makespan is computed."""

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
        ends = self.schedule.event_order.ends(Timing(durations, [0, *self._hops], [*self._hops, 0]))
        return max(row[-1] for row in ends if row)

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


def schedule_and_cut(
    policy: str,
    costs: LayerCosts,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    limit: float | None = None,
    cut: StageCut | None = None,
) -> tuple[Schedule, StageCut]:
    """Return a schedule of `policy` and the number of layers of each stage (`cut`, if given).

    A named policy is made for stages of equal cost. For `auto` each possible number of chunks is tried, with
    the schedule found for the even cut; the shortest step within `limit` wins. Raises PlanError, and
    ScheduleError where no schedule keeps the limit.
    """
    layers = len(costs.total)
    if policy != AUTO:
        made = schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks, limit=limit)
        if cut is not None:
            _require_cut(cut, layers, made.stages)
        return made, cut or fastest_cut(costs, made)
    if cut is not None:
        chunks = chunks or default_chunks(policy, ranks=ranks, stages=len(cut))
        _require_cut(cut, layers, ranks * chunks)
    counts = chunk_counts(ranks, layers) if chunks is None else (chunks,)
    found, errors = [], []
    for count in counts:
        try:
            found.append(_automatic(costs, ranks, microbatches, count, limit, cut))
        except ScheduleError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    return min(found, key=lambda pair: simulated(pair[0], costs.of_stages(pair[1])).makespan)


def _require_cut(cut: StageCut, layers: int, stages: int) -> None:
    if len(cut) != stages or sum(cut) != layers or min(cut) < 1:
        raise PlanError(
            f"plan.layers_per_stage = {list(cut)} does not cut {layers} layers into {stages} stages: "
            f"give {stages} counts of at least 1 with the sum {layers}."
        )


@lru_cache(maxsize=64)  # a search takes seconds, and a process may build one blueprint many times
def _automatic(
    costs: LayerCosts, ranks: int, microbatches: int, chunks: int, limit: float | None, cut: StageCut | None
) -> tuple[Schedule, StageCut]:
    stages = costs.of_stages(cut or balance(costs.total, ranks * chunks))
    made = schedule(AUTO, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=stages, limit=limit)
    return made, cut or fastest_cut(costs, made)


def fastest_cut(costs: LayerCosts, schedule: Schedule) -> StageCut:
    """Return the layers per stage with the least simulated makespan of `schedule`, found by local search.

    From the even cut (`balance`), boundaries move by one layer as long as that helps.
    Raises `PlanError` as `balance` does.
    """
    best = balance(costs.total, schedule.stages)
    if schedule.stages == 1:
        return best
    simulation = CutSimulation(costs, schedule.split_backward)
    left = MOST_ACTIONS // sum(len(actions) for actions in simulation.schedule.actions)
    makespan = simulation.makespan(best)
    improved = True
    while improved:
        improved = False
        for cut in _neighbours(best):
            left -= 1
            if left < 0:
                return best
            if simulation.least(cut) >= makespan:
                continue
            candidate = simulation.makespan(cut)
            if candidate < makespan:
                best, makespan, improved = cut, candidate, True
    return best


def _neighbours(cut: StageCut) -> Iterator[StageCut]:
    """Yield every cut into stages that differs from `cut` by one boundary moved by one layer."""
    for stage in range(len(cut) - 1):
        for step in (1, -1):
            moved = list(cut)
            moved[stage] += step
            moved[stage + 1] -= step
            if min(moved) > 0:
                yield tuple(moved)
