"""The simulated steps of many plans; parts that several plans share are computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plait.estimate.memory.plan_memories import CutPipeline
from plait.estimate.prediction.prediction import Prediction, prediction_of
from plait.estimate.search.plan_bounds import Bounds, least_ends
from plait.estimate.time.step_times import (
    StepEndSizes,
    StepTimes,
    hides_sums,
    latest_ends,
    stage_kinds,
    stage_modes,
)
from plait.plan.plan import Plan
from plait.schedules.search.stage_cuts import schedule_and_cut


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

    def pipeline(self, plan: Plan) -> CutPipeline:
        """Return the schedule and the cut of a plan, those that `predict` finds."""
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches)
        if key not in self._pipelines:
            schedule, cut = schedule_and_cut(
                plan.schedule,
                self.bounds.model.costs_for_cut(plan),
                ranks=plan.pp,
                microbatches=plan.microbatches,
                chunks=plan.chunks,
                limit=plan.memory_limit,
            )
            self._pipelines[key] = CutPipeline(schedule, cut)
        return self._pipelines[key]

    def step(self, plan: Plan) -> ScheduledActions:
        """Return the actions of a plan's step."""
        timer, pipeline = self.bounds.timer(plan), self.pipeline(plan)
        assert not isinstance(plan.recompute, tuple)
        schedule = pipeline.schedule
        ends = {hides_sums(timer.shape, schedule, stage) for stage in (0, schedule.stages - 1)}
        layers = tuple(
            timer.times(kind, plan.recompute, at_once=at_once)
            for at_once in sorted(ends)
            for kind in dict.fromkeys(self.bounds.model.kinds)
        )
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches, plan.tp, layers, timer.message_seconds)
        if key not in self._steps:
            stages = stage_kinds(self.bounds.model.kinds, pipeline.cut)
            modes = stage_modes(plan, pipeline.cut)
            self._steps[key] = ScheduledActions(StepTimes(timer, schedule, stages, modes))
        return self._steps[key]

    def prediction(self, plan: Plan) -> Prediction:
        """Return what `predict` returns for a plan."""
        bounds, rows = self.bounds, self.bounds.batch // plan.dp
        return prediction_of(bounds.model, plan, bounds.hardware, rows, self.pipeline(plan), bounds.memories)

    def memory_at_once(self, plan: Plan) -> float | None:
        """Return the most bytes that a rank allocates, or None where it takes long to know."""
        return self.bounds.memories.at_once(self.bounds.sizes(plan), self.pipeline(plan))

    def memory(self, plan: Plan) -> float:
        """Return the most bytes that a rank allocates, as `predict` does."""
        ranks = self.bounds.memories.ranks(self.bounds.sizes(plan), self.pipeline(plan), 0.0)
        return max(rank.allocated for rank in ranks)
