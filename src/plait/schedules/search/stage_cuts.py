"""Costs of the layers of a model, and the cut of the layers into stages: even, or chosen with the schedule.

Stages of even cost are not always best: in a short step the first and last stages also pay for filling and
draining the pipeline. So the even cut is only the start of the search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import frexp, isfinite, lcm, ldexp
from operator import add
from typing import NamedTuple

from plait.errors import PlanError, ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.event_simulation import Timing
from plait.schedules.schedule import Schedule
from plait.schedules.search.auto_search import chunk_counts
from plait.schedules.search.schedule_by_policy import AUTO, default_chunks, schedule
from plait.schedules.timed_schedule import simulated

HOP, MESSAGE = 0.01, 0.0025
"""Message times as parts of a rank's work on a micro-batch, measured on two ranks of a host with Gloo."""
BITS = 40
"""Bits of the largest cost of a layer on the grid of a simulation."""
MOST_ACTIONS = 1 << 17
"""Actions simulated in one search, so that it takes a tenth of a second or so."""
StageCut = tuple[int, ...]
"""Number of layers per stage, first stage first."""


@dataclass(frozen=True)
class LayerCosts:
    """Times of each layer's forward, input gradient and weight gradient, and of messages, in one unit."""

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
        """Return a copy in which `cost` of a layer's total is all in its input gradient (`I`)."""
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
        """Return the costs of stages, given the number of layers of each (`cut`)."""
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
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    total = list(accumulate((int(cost * unit) for cost in exact), initial=0))  # of the first 0, 1, 2 … layers
    return _evenest(total, parts, limit=_least_peak(total, parts))


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
    """Simulates `schedule` for different divisions of the layers into stages, one after another.

    Costs are rounded to a binary grid, 2⁻⁴⁰ of the largest: sums are exact, and stages of equal layers cost
    exactly the same. Whole numbers below 2⁴⁰ stay what they are.
    """

    costs: LayerCosts
    schedule: Schedule
    factors: tuple[float, ...] | None = None
    """Of each stage: how many times as long its rank takes for its layers; None: all ranks are alike."""

    def makespan(self, cut: Sequence[int]) -> int:
        """Return the makespan for `cut` (layers per stage), as an integer to compare with that of others."""
        forward, inputs, weights = self._durations(cut)
        both = [first + second for first, second in zip(inputs, weights, strict=True)]
        durations = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both}
        return max(self.schedule.event_order.last_ends(Timing(durations, [0, *self._hops], [*self._hops, 0])))

    def least(self, cut: Sequence[int]) -> int:
        """Return a lower bound of `makespan(cut)` without a simulation.

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
        sent = [time + message for time in forward], [time + message for time in inputs], weights
        if self.factors is None:
            return sent
        forward, inputs, weights = (
            [round(time * factor) for time, factor in zip(each, self.factors, strict=True)] for each in sent
        )
        return forward, inputs, weights

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
    """Return the layers per stage with the shortest simulated step of `schedule`, by local search.

    From the even cut (`balance`), boundaries move by one layer as long as that helps.
    Raises `PlanError` as `balance` does.
    """
    best = balance(costs.total, schedule.stages)
    if schedule.stages == 1:
        return best
    return _improved(best, CutSimulation(costs, schedule.split_backward), farthest=1)


def fastest_cut_of_unlike_ranks(
    costs: LayerCosts, schedule: Schedule, factors: Sequence[float], now: StageCut
) -> StageCut:
    """Return the layers per stage with the shortest simulated step of ranks that differ in speed.

    `factors`: how many times as long each rank takes for a layer as `costs` say. The local search of
    `fastest_cut`, here over any two stages, starts from `now`, and from the cut whose slowest stage takes the
    least time.
    """
    of_stages = tuple(factors[rank] for rank in schedule.rank_of)
    simulation = CutSimulation(costs, schedule.split_backward, of_stages)
    starts = (now, _even_cut_of_unlike_stages(costs.total, of_stages))
    found = (_improved(start, simulation, farthest=schedule.stages) for start in starts)
    return min(found, key=simulation.makespan)


def _even_cut_of_unlike_stages(costs: Sequence[float], factors: Sequence[float]) -> StageCut:
    """Return the layers per stage that minimise the largest stage cost times the slowness of its rank."""
    total = list(accumulate(costs, initial=0.0))
    found: dict[int, tuple[float, StageCut]] = {0: (0.0, ())}
    """By the number of layers of the stages so far: the least largest of them, and their cut."""
    for stages_left, factor in zip(reversed(range(len(factors))), factors, strict=True):
        found = {
            stop: min(
                (max(largest, factor * (total[stop] - total[start])), (*cut, stop - start))
                for start, (largest, cut) in found.items()
                if start < stop
            )
            for stop in range(min(found) + 1, len(total) - stages_left)
        }
    return found[len(costs)][1]


def _improved(best: StageCut, simulation: CutSimulation, *, farthest: int) -> StageCut:
    """Return a cut from which no move of one layer makes the simulated step shorter, starting from `best`.

    `farthest`: how far apart the two stages may be of which one gets a layer more, and the other one less.
    """
    left = MOST_ACTIONS // sum(len(actions) for actions in simulation.schedule.actions)
    makespan = simulation.makespan(best)
    improved = True
    while improved:
        improved = False
        for cut in _neighbours(best, farthest):
            left -= 1
            if left < 0:
                return best
            if simulation.least(cut) >= makespan:
                continue
            candidate = simulation.makespan(cut)
            if candidate < makespan:
                best, makespan, improved = cut, candidate, True
    return best


def _neighbours(cut: StageCut, farthest: int) -> Iterator[StageCut]:
    """Yield cuts in which one layer has moved to another stage, at most `farthest` stages away."""
    for distance in range(1, min(farthest, len(cut) - 1) + 1):
        for stage in range(len(cut) - distance):
            for step in (1, -1):
                moved = list(cut)
                moved[stage] += step
                moved[stage + distance] -= step
                if min(moved) > 0:
                    yield tuple(moved)
