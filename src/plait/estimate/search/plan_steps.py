"""The simulated steps of many plans; parts that several plans share are computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plait.estimate.search.memory_bounds import KINDS
from plait.estimate.search.plan_bounds import Bounds, least_ends
from plait.estimate.time.layer_operations import MicrobatchShape
from plait.estimate.time.memory_by_size import ActivationMemories, RankActivations
from plait.estimate.time.prediction import Prediction, costs_for_cut, prediction_of
from plait.estimate.time.state_memory import ParameterCounts
from plait.estimate.time.step_times import (
    StepEndSizes,
    StepTimes,
    hides_sums,
    latest_ends,
    stage_kinds,
    stage_modes,
)
from plait.plan.model_sizes import LayerKind
from plait.plan.plan import Plan
from plait.schedules.held_microbatches import HeldCounts, HeldMicrobatches
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import schedule_and_cut


@dataclass(frozen=True)
class CutPipeline:
    """A schedule, with the cut of the model into its stages."""

    schedule: Schedule
    cut: tuple[int, ...]
    stages: tuple[tuple[LayerKind, ...], ...]
    ranks: tuple[HeldCounts, ...]
    """Those that may have most memory."""


@dataclass(frozen=True)
class ScheduledActions:
    """The actions of a step that plans with the same schedule and the same layer times have in common."""

    times: StepTimes

    @property
    def latest(self) -> Mapping[StepEndSizes, float]:
        """Seconds to the last actions, see `StepTimes.latest`."""
        return self.times.latest

    @cached_property
    def least(self) -> Mapping[StepEndSizes, float]:
        """Lower bounds of `latest`, without a simulation."""
        return latest_ends(self.times.work, least_ends(self.times))


@dataclass(frozen=True)
class PlanSteps:
    """The steps and the memory of plans of one model."""

    bounds: Bounds
    _pipelines: dict[tuple[object, ...], CutPipeline] = field(default_factory=dict)
    _steps: dict[tuple[object, ...], ScheduledActions] = field(default_factory=dict)
    _kept: dict[tuple[object, ...], tuple[RankActivations, ...]] = field(default_factory=dict)

    def pipeline(self, plan: Plan) -> CutPipeline:
        """Return the schedule and the cut of a plan, those that `predict` finds."""
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches)
        if key not in self._pipelines:
            schedule, cut = schedule_and_cut(
                plan.schedule,
                costs_for_cut(self.bounds.model, plan),
                ranks=plan.pp,
                microbatches=plan.microbatches,
                chunks=plan.chunks,
                limit=plan.memory_limit,
            )
            stages = stage_kinds(self.bounds.model.kinds, cut)
            self._pipelines[key] = CutPipeline(schedule, cut, stages, _largest_ranks(schedule, stages))
        return self._pipelines[key]

    def step(self, plan: Plan) -> ScheduledActions:
        """Return the actions of a plan's step."""
        timer, pipeline = self.bounds.timer(plan), self.pipeline(plan)
        assert not isinstance(plan.recompute, tuple)
        schedule = pipeline.schedule
        ends = {hides_sums(timer.shape, schedule, stage) for stage in (0, schedule.stages - 1)}
        layers = tuple(
            timer.times(kind, plan.recompute, at_once=at_once) for at_once in sorted(ends) for kind in KINDS
        )
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches, plan.tp, layers, timer.message_seconds)
        if key not in self._steps:
            modes = stage_modes(plan, pipeline.cut)
            self._steps[key] = ScheduledActions(StepTimes(timer, schedule, pipeline.stages, modes))
        return self._steps[key]

    def prediction(self, plan: Plan) -> Prediction:
        """Return what `predict` returns for a plan."""
        pipeline, bounds = self.pipeline(plan), self.bounds
        return prediction_of(bounds.timer(plan).shape, bounds.hardware, pipeline.schedule, pipeline.cut)

    def memory(self, plan: Plan) -> float:
        """Return the most bytes that a rank allocates, as `predict` does."""
        shape = self.bounds.timer(plan).shape
        return max(rank.with_state(shape, 0.0).allocated for rank in self._activations(plan, shape))

    def _activations(self, plan: Plan, shape: MicrobatchShape) -> tuple[RankActivations, ...]:
        """Return what the ranks keep; those of equal sizes count as one."""
        pipeline, layers = self.pipeline(plan), (plan.tp, plan.cp, shape.rows, plan.sequence_parallel)
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches, *layers, plan.recompute)
        if key not in self._kept:
            modes = stage_modes(plan, pipeline.cut)
            most: dict[tuple[ParameterCounts, bool], RankActivations] = {}
            known = ActivationMemories(shape, pipeline.schedule, pipeline.stages, modes)
            for rank in map(known.activations, pipeline.ranks):
                alike = rank.sizes, rank.splits
                most[alike] = rank.joined(most[alike]) if alike in most else rank
            self._kept[key] = tuple(most.values())
        return self._kept[key]


def _largest_ranks(schedule: Schedule, stages: Sequence[tuple[LayerKind, ...]]) -> tuple[HeldCounts, ...]:
    """Return the ranks that may have most memory: of those with equal stages the ones that hold most."""
    messages = [schedule.exchanges_before(stage) for stage in range(schedule.stages)] + [False]
    alike = [
        tuple((stages[stage], messages[stage], messages[stage + 1]) for stage in schedule.stages_of(rank))
        for rank in range(schedule.ranks)
    ]
    return tuple(HeldMicrobatches(schedule).largest(alike))
