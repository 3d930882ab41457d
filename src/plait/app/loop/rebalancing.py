"""Simulates how much slow ranks delay a step, and finds the layers per stage with the shortest step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from plait.app.loop.rank_times import OwnTimes
from plait.engine.blueprint import assumed_costs
from plait.engine.engine import Engine
from plait.schedules.action import Kind
from plait.schedules.costs import Costs
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import LayerCosts, StageCut, fastest_cut_of_unlike_ranks
from plait.schedules.timed_schedule import simulated


@dataclass(frozen=True)
class StepSimulation:
    """Simulates a step of a schedule, given the costs of layers and how slow each rank is."""

    costs: LayerCosts
    """Of layers, in seconds, on ranks that are not slow."""
    schedule: Schedule
    factors: tuple[float, ...]
    """Of each rank of `pp`: how many times as long it takes; of replicas the slowest counts."""

    def stage_costs(self, cut: Sequence[int], factors: Sequence[float] | None = None) -> Costs:
        """Return the costs of stages of `cut` layers each, times the slowness `factors` of their ranks."""
        alike = self.costs.of_stages(cut)
        of_ranks = self.factors if factors is None else factors
        of_stages = [of_ranks[rank] for rank in self.schedule.rank_of]
        forward, inputs, weights = (
            [factor * cost for factor, cost in zip(of_stages, each, strict=True)]
            for each in (alike.F, alike.I, alike.W)
            if isinstance(each, Sequence)
        )
        return replace(alike, F=forward, I=inputs, W=weights)

    def seconds(self, cut: Sequence[int]) -> float:
        """Return the seconds of a simulated step; `cut`: the number of layers of each stage."""
        return self._makespan(self.stage_costs(cut))

    def seconds_without_slow_ranks(self, cut: Sequence[int]) -> float:
        """Return the seconds of a step simulated with equally fast ranks; `cut`: the layers of each stage."""
        return self._makespan(self.stage_costs(cut, [1.0] * len(self.factors)))

    def _makespan(self, costs: Costs) -> float:
        return simulated(self.schedule.split_backward, costs).makespan

    def fastest_cut(self, now: StageCut) -> StageCut:
        """Return the layers per stage with the shortest simulated step, searched from the present `now`."""
        if self.schedule.stages == 1:
            return now
        return fastest_cut_of_unlike_ranks(self.costs, self.schedule, self.factors, now)


def rank_costs(costs: Sequence[float], engine: Engine) -> list[float]:
    """Return the cost of each world rank's layers, given the costs of all layers of the model."""
    of_stages = [sum(costs[layer] for layer in layers) for layers in engine.blueprint.stage_layers]
    schedule, mesh = engine.schedule, engine.mesh
    of_places = [sum(of_stages[stage] for stage in schedule.stages_of(at)) for at in range(schedule.ranks)]
    return [of_places[mesh.coordinate_of(rank)["pp"]] for rank in range(mesh.world)]


def layer_costs_of(engine: Engine) -> LayerCosts:
    """Return the assumed forward and backward cost of each layer of the engine's model."""
    return assumed_costs(engine.blueprint.sequence, engine.blueprint.output_linear)


def simulation_of(
    engine: Engine, times: Sequence[OwnTimes], longer: Mapping[int, float], slow: Mapping[int, float]
) -> StepSimulation:
    """Return a simulation of an engine's steps, made from their measured times.

    `times`: of each rank of the world. By rank, `longer`: how many times as long as on others those are;
    `slow`: how much slower it is in all, also by waits for a core. Layers cost what the blueprint assumes,
    scaled so that each stage costs what it took, on a rank that is not slow.
    """
    blueprint, mesh, schedule = engine.blueprint, engine.mesh, engine.schedule
    assumed = layer_costs_of(engine)
    scaled: tuple[list[float], ...] = ([], [], [])
    places = [mesh.coordinate_of(rank)["pp"] for rank in range(mesh.world)]
    for stage, layers in enumerate(blueprint.stage_layers):
        of_stage = [
            _per_microbatch(times[rank], stage, schedule.microbatches, longer.get(rank, 1.0))
            for rank, place in enumerate(places)
            if place == schedule.rank_of[stage]
        ]
        taken = [median(each) for each in zip(*of_stage, strict=True)]
        for column, costs, seconds in zip(scaled, (assumed.F, assumed.I, assumed.W), taken, strict=True):
            whole = sum(costs[layer] for layer in layers)
            column += [seconds * (costs[layer] / whole if whole else 1 / len(layers)) for layer in layers]
    factors = [
        max(slow.get(rank, 1.0) for rank, place in enumerate(places) if place == own)
        for own in range(schedule.ranks)
    ]
    forward, inputs, weights = map(tuple, scaled)
    measured = LayerCosts(forward, inputs, weights).with_messages(schedule.ranks)
    return StepSimulation(measured, schedule, tuple(factors))


def _per_microbatch(
    times: OwnTimes, stage: int, microbatches: int, factor: float
) -> tuple[float, float, float]:
    """Return the seconds of F, I and W of a micro-batch of a stage on a rank that is not slow."""
    forward, inputs, weights, both = (
        times.get((stage, kind), 0.0) / microbatches / factor for kind in (Kind.F, Kind.I, Kind.W, Kind.B)
    )
    return forward, inputs + both / 2, weights + both / 2
