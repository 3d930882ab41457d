"""Simulates how much slow ranks delay a step, and searches for the division of work with the shortest one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from plait.app.loop.rank_times import OwnTimes
from plait.app.loop.work_division import WorkDivision
from plait.engine.blueprint import assumed_costs
from plait.engine.engine import Engine, shortest_schedule
from plait.errors import ScheduleError
from plait.plan.axes import index_along
from plait.schedules.action import Kind
from plait.schedules.costs import Costs, is_within, peak_memory
from plait.schedules.named_schedules import policies_for, policy_schedule
from plait.schedules.schedule import Placement, Schedule
from plait.schedules.search.stage_cuts import LayerCosts, fastest_cut_of_unlike_ranks
from plait.schedules.timed_schedule import simulated

WORTHWHILE = 0.01
"""The part of a step that other rows, or another order of actions, have to save."""


@dataclass(frozen=True)
class DivisionMemory:
    """Predicts the memory of the rank that needs most under another division of work; has a limit."""

    bytes_of: Callable[[WorkDivision], float | None]
    """Returns the bytes of the rank with most; None where they are not known."""
    limit: float | None = None
    """The most bytes of a rank; None: only another order of actions may not need more than that of before."""

    def is_within_limit(self, work: WorkDivision) -> bool:
        """Return whether every rank's predicted memory for `work` is within the limit; True if unknown."""
        return self.limit is None or (self.bytes_of(work) or 0.0) <= self.limit

    def allows_order(self, other: WorkDivision, work: WorkDivision) -> bool:
        """Return whether `other` fits the memory limit; without one, whether it needs no more than `work`.

        That is the predicted memory of the rank that needs most; True where it is not known.
        """
        most = self.limit if self.limit is not None else self.bytes_of(work)
        return most is None or replace(self, limit=most).is_within_limit(other)


@dataclass(frozen=True)
class StepSimulation:
    """Simulates steps, given the costs of layers and how slow each rank is."""

    costs: LayerCosts
    """Of layers, in seconds, for a micro-batch of equal shares of rows, on ranks that are not slow."""
    factors: tuple[tuple[float, ...], ...]
    """Of each replica, by index along `dp`, and each rank of `pp` in it: how many times as long it takes."""

    def stage_costs(self, cut: Sequence[int], order: Schedule, factors: Sequence[float]) -> Costs:
        """Return the costs of stages of `cut` layers each, times the `factors` of their ranks."""
        alike = self.costs.of_stages(cut)
        of_stages = [factors[rank] for rank in order.rank_of]
        forward, inputs, weights = (
            [factor * cost for factor, cost in zip(of_stages, each, strict=True)]
            for each in (alike.F, alike.I, alike.W)
            if isinstance(each, Sequence)
        )
        return replace(alike, F=forward, I=inputs, W=weights)

    def seconds(self, work: WorkDivision) -> float:
        """Return the seconds of a simulated step: those of the replica that takes longest."""
        each = zip(self._replica_seconds(work), work.shares, strict=True)
        return max(seconds * share for seconds, share in each)

    def seconds_without_slow_ranks(self, work: WorkDivision) -> float:
        """Return the seconds of a step simulated with equally fast ranks."""
        alike = tuple((1.0,) * len(one) for one in self.factors)
        return replace(self, factors=alike).seconds(work)

    def _replica_seconds(self, work: WorkDivision) -> list[float]:
        """Return for each replica the seconds of a simulated step with an equal share of rows."""
        order = work.order.split_backward
        known = {
            factors: simulated(order, self.stage_costs(work.cut, order, factors)).makespan
            for factors in set(self.factors)
        }
        return [known[factors] for factors in self.factors]

    def _slowest_factors(self, work: WorkDivision) -> list[float]:
        """Return the largest factor over replicas, times a replica's share of rows, of each rank of `pp`."""
        scaled = [[share * one for one in own] for share, own in zip(work.shares, self.factors, strict=True)]
        return [max(each) for each in zip(*scaled, strict=True)]

    def with_fastest_cut(self, work: WorkDivision) -> WorkDivision:
        """Return `work` with the layers per stage of the shortest simulated step, by a local search."""
        if work.order.stages == 1:
            return work
        factors = self._slowest_factors(work)
        cut = fastest_cut_of_unlike_ranks(self.costs, work.order, factors, work.cut)
        return min((work, replace(work, cut=cut)), key=self.seconds)

    def with_fastest_rows(self, work: WorkDivision) -> WorkDivision:
        """Return `work` with the rows per replica of the shortest step, at least one for each micro-batch.

        Time is proportional to rows. Each row goes to the replica that ends first with it, which is optimal;
        of several to the one with fewest rows.
        """
        seconds = self._replica_seconds(work)
        rows = [work.order.microbatches] * len(seconds)
        ends = [((rows[replica] + 1) * one, rows[replica], replica) for replica, one in enumerate(seconds)]
        heapq.heapify(ends)
        for _ in range(sum(work.rows) - sum(rows)):
            end, _, replica = ends[0]
            rows[replica] += 1
            heapq.heapreplace(ends, (end + seconds[replica], rows[replica], replica))
        return self._if_worthwhile(replace(work, rows=tuple(rows)), work)

    def _if_worthwhile(self, other: WorkDivision, work: WorkDivision) -> WorkDivision:
        """Return `other` if it saves a part of a step that counts, else `work`."""
        return other if self.seconds(other) < (1 - WORTHWHILE) * self.seconds(work) else work

    def with_fastest_order(
        self, work: WorkDivision, limit: float, memory: DivisionMemory | None = None
    ) -> WorkDivision:
        """Return `work` with a faster order of actions, if found, and the best layers per stage for it.

        `limit`: the most micro-batches that a rank may hold; `memory`: and the most bytes, since those of
        unlike stages differ. Tried are named orders of the same stages, then one that is searched for
        the best of them, which takes some seconds.
        """

        def fastest_allowed(others: Iterable[WorkDivision]) -> WorkDivision:
            for one in sorted((work, *others), key=self.seconds):
                if one == work or memory is None or memory.allows_order(one, work):
                    return one
            raise AssertionError("`work` is allowed")

        tried = [self.with_fastest_cut(replace(work, order=order)) for order in _named_orders(work, limit)]
        best = fastest_allowed(tried)
        costs = self.stage_costs(best.cut, best.order, self._slowest_factors(best))
        with suppress(ScheduleError):  # no order is searched for stages that the user has placed
            order = shortest_schedule(best.order, costs, limit)
            best = fastest_allowed([best, self.with_fastest_cut(replace(best, order=order))])
        return self._if_worthwhile(best, work)

    def fastest(
        self,
        now: WorkDivision,
        *,
        moves_rows: bool,
        memory_limit: float | None = None,
        memory: DivisionMemory | None = None,
    ) -> WorkDivision:
        """Return the division of work with the shortest simulated step that is found, starting from `now`.

        `moves_rows`: whether replicas may have unlike numbers of rows. `memory_limit`: that of other orders
        of actions, in micro-batches; None: the order stays. `memory`: what a rank may hold in bytes, too.
        """
        searches: list[Callable[[WorkDivision], WorkDivision]] = [self.with_fastest_cut]
        if moves_rows:
            searches.append(self.with_fastest_rows)
        found = []
        for first in range(len(searches)):
            work = now
            for search in [*searches[first:], *searches[: first + 1]]:
                work = search(work)
            found.append(work)
        found = [one for one in found if memory is None or memory.is_within_limit(one)]
        best = min(found or [now], key=self.seconds)
        if memory_limit is None or best.order.ranks == 1:
            return best
        return self.with_fastest_order(best, memory_limit, memory)


def _named_orders(work: WorkDivision, limit: float) -> Iterator[Schedule]:
    """Yield the orders of named policies with the stages and ranks of `work`, of at most `limit` memory."""
    order = work.order
    chunks = order.stages // order.ranks
    for placement in Placement:
        if placement.rank_of(order.ranks, chunks) == order.rank_of:
            for name in policies_for(placement, chunks):
                made = policy_schedule(name, order.ranks, order.microbatches, chunks)
                if is_within(made, limit, Costs().memory(made.ranks, made.stages)):
                    yield made


def memory_limit_of(engine: Engine) -> float | None:
    """Return how many micro-batches a rank may hold in other orders of actions; None: the order must stay.

    That is the plan's `memory_limit`, else what ranks hold in the plan's own order.
    """
    balance = engine.runtime.balance
    if balance is not None and balance.settings.counts == "step":  # needs all forwards first
        return None
    limit = engine.plan.memory_limit
    return float(max(peak_memory(engine.blueprint.schedule))) if limit is None else limit


def rank_costs(costs: Sequence[float], engine: Engine) -> list[float]:
    """Return the cost of each world rank's layers, given the costs of all layers of the model."""
    of_stages = [sum(costs[layer] for layer in layers) for layers in engine.blueprint.stage_layers]
    schedule, mesh = engine.schedule, engine.mesh
    of_places = [sum(of_stages[stage] for stage in schedule.stages_of(at)) for at in range(schedule.ranks)]
    return [of_places[mesh.coordinate_of(rank)["pp"]] for rank in range(mesh.world)]


def layer_costs_of(engine: Engine) -> LayerCosts:
    """Return the assumed forward and backward cost of each layer of the engine's model."""
    return assumed_costs(engine.blueprint.sequence, engine.blueprint.output_linear)


def replicas_of_ranks(engine: Engine) -> list[int]:
    """Return the index along `dp` of each rank of the world."""
    mesh = engine.mesh
    return [index_along("dp", mesh.coordinate_of(rank), mesh.sizes) for rank in range(mesh.world)]


def simulation_of(
    engine: Engine, times: Sequence[OwnTimes], longer: Sequence[float], slow: Mapping[int, float]
) -> StepSimulation:
    """Return a simulation of an engine's steps, made from their measured times.

    `times`: of each rank of the world. `longer`: how many times as long as those of a rank that is not slow,
    with an equal share of rows, each rank's are. `slow`: by rank how much slower it is in all, also by waits
    for a core. Layers cost what the blueprint assumes, scaled so that each stage costs what it took.
    """
    blueprint, mesh, schedule = engine.blueprint, engine.mesh, engine.schedule
    assumed = layer_costs_of(engine)
    scaled: tuple[list[float], ...] = ([], [], [])
    places = [mesh.coordinate_of(rank)["pp"] for rank in range(mesh.world)]
    for stage, layers in enumerate(blueprint.stage_layers):
        of_stage = [
            _per_microbatch(times[rank], stage, schedule.microbatches, longer[rank])
            for rank, place in enumerate(places)
            if place == schedule.rank_of[stage]
        ]
        taken = [median(each) for each in zip(*of_stage, strict=True)]
        for column, costs, seconds in zip(scaled, (assumed.F, assumed.I, assumed.W), taken, strict=True):
            whole = sum(costs[layer] for layer in layers)
            column += [seconds * (costs[layer] / whole if whole else 1 / len(layers)) for layer in layers]
    factors = [[1.0] * schedule.ranks for _ in range(mesh.size("dp"))]
    for rank, (replica, place) in enumerate(zip(replicas_of_ranks(engine), places, strict=True)):
        factors[replica][place] = max(factors[replica][place], slow.get(rank, 1.0))
    forward, inputs, weights = map(tuple, scaled)
    measured = LayerCosts(forward, inputs, weights).with_messages(schedule.ranks)
    return StepSimulation(measured, tuple(map(tuple, factors)))


def _per_microbatch(
    times: OwnTimes, stage: int, microbatches: int, factor: float
) -> tuple[float, float, float]:
    """Return the seconds of F, I and W of a micro-batch of a stage on a rank that is not slow."""
    forward, inputs, weights, both = (
        times.get((stage, kind), 0.0) / microbatches / factor for kind in (Kind.F, Kind.I, Kind.W, Kind.B)
    )
    return forward, inputs + both / 2, weights + both / 2
