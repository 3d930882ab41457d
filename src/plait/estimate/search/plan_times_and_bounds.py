"""Times and memory of plans in a search: `Bounds` below those of every cut, `PlanSteps` of the chosen one.

Parts that several plans share are computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from plait.estimate.memory.memory_bounds import LINEAR, WHOLE
from plait.estimate.memory.plan_memories import CutPipeline, PlanMemories, cut_pipeline
from plait.estimate.prediction.predicted_model import PredictedModel
from plait.estimate.prediction.prediction import Prediction, prediction_of
from plait.estimate.time.hardware import Hardware
from plait.estimate.time.layer_times import LayerTimer, LayerVariant, PassTimes, WholeLayerTimes
from plait.estimate.time.layer_work import MicrobatchSizes
from plait.estimate.time.step_times import (
    NANOSECOND,
    StepEndSizes,
    StepTimes,
    gradient_transfers,
    hides_sums,
    latest_ends,
    optimizer_seconds,
    stage_kinds,
    stage_modes,
)
from plait.estimate.time.whole_parameter_updates import owner_seconds
from plait.plan.decoder_sizes import LayerKind
from plait.plan.parameter_units import timing_of
from plait.plan.plan import Plan

ROUNDING = 1 - 1e-9
"""Bounds are lowered by it, so that no rounding of sums makes one larger than what it bounds."""
_CHUNKED = ("interleaved", "zb-v", "v-half")
"""Policies of several stages on each rank, of which that of the first forward is the rank's number."""


@dataclass(frozen=True)
class ModelTime:
    """Seconds of a model's forward and backward for one micro-batch: the sums over all layers."""

    forward: float
    inputs: float
    weights: float
    forward_part: float
    """The least part of a layer's time that is its forward."""
    weights_part: float
    """The largest part that is its weight gradient."""
    layers: Mapping[LayerKind, tuple[float, float]]
    """Forward and backward of a layer of each kind."""

    @property
    def total(self) -> float:
        """Seconds of forward, input gradient and weight gradient together."""
        return self.forward + self.inputs + self.weights


class LayerParameters(NamedTuple):
    """The trained parameters of one or more layers on a rank, before sharding."""

    elements: float
    experts: float
    """Those of experts that the plan divides, among them."""

    @property
    def others(self) -> float:
        """The parameters that do not belong to experts."""
        return self.elements - self.experts


@dataclass(frozen=True)
class Bounds:
    """Computes lower bounds of the step time and memory of plans, for one model, batch and hardware."""

    model: PredictedModel
    hardware: Hardware
    batch: int
    _layers: dict[tuple[object, ...], dict[LayerVariant, PassTimes]] = field(default_factory=dict)
    _whole: dict[tuple[object, ...], dict[LayerVariant, WholeLayerTimes]] = field(default_factory=dict)
    _times: dict[tuple[object, ...], ModelTime] = field(default_factory=dict)
    _parameters: dict[tuple[int, ...], tuple[LayerParameters, ...]] = field(default_factory=dict)

    def sizes(self, plan: Plan) -> MicrobatchSizes:
        """Return the sizes and operations of a plan's micro-batch."""
        rows = self.batch / plan.dp / plan.microbatches
        return self.model.sizes(plan, rows, on_cpu=not self.hardware.overlaps)

    def timer(self, plan: Plan) -> LayerTimer:
        """Return the `LayerTimer` that predicts the seconds of a plan's layers; equal ones are timed once."""
        sizes, key = self.sizes(plan), self._key(plan)
        known, whole = self._layers.setdefault(key, {}), self._whole.setdefault(key[:-1], {})
        return LayerTimer(sizes, self.hardware, sizes.precision, known, whole)

    def _key(self, plan: Plan) -> tuple[object, ...]:
        """Return a cache key of the times of a plan's layers, without their recomputation."""
        timing = timing_of(plan)
        state = (timing, plan.shard) if timing.allocates else ()
        rows = self.batch / plan.dp / plan.microbatches
        return plan.tp, plan.cp, plan.ep, plan.etp, rows, plan.sequence_parallel, state

    def model_time(self, plan: Plan, *, at_once: bool) -> ModelTime:
        """Return the seconds of all layers for one micro-batch; plans with equal layers share them.

        `at_once`: as if weight gradients ran during sums over `tp` on all stages.
        """
        key = (self._key(plan), plan.recompute, at_once)
        if key not in self._times:
            self._times[key] = self._computed(plan, at_once)
        return self._times[key]

    def _computed(self, plan: Plan, at_once: bool) -> ModelTime:
        timer, sums, part, weights_part = self.timer(plan), [0.0, 0.0, 0.0], 1.0, 0.0
        layers: dict[LayerKind, tuple[float, float]] = {}
        assert not isinstance(plan.recompute, tuple)
        for kind, times in self._counts.items():
            passes = timer.times(kind, plan.recompute, at_once=at_once)
            for number, one in enumerate((passes.forward, passes.inputs, passes.weights)):
                sums[number] += times * one.total
            whole = passes.total.total
            part = min(part, passes.forward.total / whole) if whole else 0.0
            weights_part = max(weights_part, passes.weights.total / whole) if whole else weights_part
            layers[kind] = passes.forward.total, passes.backward
        return ModelTime(sums[0], sums[1], sums[2], part, weights_part, layers)

    @cached_property
    def _counts(self) -> Counter[LayerKind]:
        """How many layers of each kind there are."""
        return Counter(self.model.kinds)

    def step_seconds(
        self, plan: Plan, policy: str | None = None, chunks: int = 1, *, state: bool = True
    ) -> float:
        """Return a lower bound of a step's seconds for any cut into stages (`policy` None: any schedule).

        Without `state`, sums of gradients and the optimizer take no time: a bound for all strategies. It is
        the largest of these bounds of the last gradient's time, and the optimizer's step after it:

        - the mean over ranks of their work, and of sums of gradients that backwards do not hide; with several
          stages on each rank after the wait for the first layers, one at least on each rank before;
        - the path of one micro-batch through all forwards and backwards, with its messages;
        - for one stage on each rank, what `pipeline_seconds` returns.

        Where ranks share cores the first holds too, and the others for actions that are as short as they can
        be, see `LayerTimer.speedup`.
        """
        timer, ranks = self.timer(plan), plan.pp
        whole, sends = policy in WHOLE, plan.sends_inputs_first
        time = self.model_time(plan, at_once=policy is None or whole)
        waits = whole and not sends  # stages before wait for weight gradients too
        # Each action's duration is rounded to nanoseconds, and so is a message's.
        rounding = 1.5 * NANOSECOND * ranks * chunks
        hop = max(timer.message_seconds - NANOSECOND, 0.0)
        backward, sums, after = time.inputs + time.weights, 0.0, 0.0
        if state:
            sums = self._exposed_sums(timer, (backward + rounding) / ranks)
            after = self._optimizer_seconds(timer)
        busy = plan.microbatches * (time.total - rounding) / ranks + sums
        path = time.forward + (backward if waits else time.inputs) - rounding
        path += 2 * chunks * (ranks - 1) * hop
        found = max(busy, path / timer.speedup)
        if policy in _CHUNKED:
            before, after_last = self._waits(plan, time, hop)
            work = plan.microbatches * (time.total - rounding) / ranks
            end = (before + work) / timer.speedup
            found = max(found, end + (max(sums, after_last / timer.speedup) if waits else sums))
        if policy in LINEAR:
            last = time.weights_part if whole and sends else 0.0
            part, hops = (1 - last, 2 * hop) if whole else (time.forward_part, hop)
            least = pipeline_seconds(time.total - rounding, plan, part, hops, last)
            found = max(found, least / timer.speedup)
        return (found + after) * ROUNDING + self.owner_seconds(plan, exchanges=state)

    def owner_seconds(self, plan: Plan, *, exchanges: bool = True) -> float:
        """Return a lower bound of the seconds that updates of whole parameters, as by Muon, add to a step.

        It holds for every cut into stages. The stage where work and exchanges together take longest has the
        mean of both over stages at least where there is one; of several it has the more of the two means.
        Without `exchanges`: of the work alone, which strategies have in common.
        """
        mean = self.model.mean_owner(plan)
        if mean is None:
            return 0.0
        work, exchanged = owner_seconds(self.timer(plan), mean)
        if not exchanges:
            return work * ROUNDING
        return (work + exchanged if plan.pp == 1 else max(work, exchanged)) * ROUNDING

    def _waits(self, plan: Plan, time: ModelTime, hop: float) -> tuple[float, float]:
        """Return mean seconds for which ranks wait for earlier stages at the start, and at the end of a step.

        The stages before that of rank r have r layers or more.
        """
        first, means = self.model.kinds[: plan.pp - 1], [0.0, 0.0]
        for number, kind in enumerate(first):
            later = (plan.pp - 1 - number) / plan.pp
            for which, seconds in enumerate(time.layers[kind]):
                means[which] += later * (seconds + hop - 2 * NANOSECOND)
        return max(means[0], 0.0), max(means[1], 0.0)

    def _exposed_sums(self, timer: LayerTimer, window: float) -> float:
        """Return the mean over ranks of gradient sums that do not overlap `window` seconds of backwards."""
        model, ranks = self._parameters_of(timer.shape.plan)[0], timer.shape.plan.pp
        seconds = gradient_transfers(timer, model.others / ranks)
        # Some ranks may have no experts, and no latency of their sums.
        seconds += gradient_transfers(timer, model.experts, experts=model.experts) / ranks
        return max(seconds - window, 0.0) if timer.hides_gradient_sums else seconds

    def _optimizer_seconds(self, timer: LayerTimer) -> float:
        """Return a lower bound of the optimizer's step on the rank where it takes longest.

        The mean over ranks, as for sums of gradients, or that of the layer with most parameters.
        """
        model, *layers = self._parameters_of(timer.shape.plan)
        ranks = timer.shape.plan.pp
        mean = sum(optimizer_seconds(timer, model.others / ranks))
        mean += sum(optimizer_seconds(timer, model.experts, experts=model.experts)) / ranks
        each = (sum(optimizer_seconds(timer, one.elements, experts=one.experts)) for one in layers)
        return max(mean, *each)

    def memory(self, plan: Plan, policy: str | None = None, *, gathered: bool = True) -> float:
        """Return a lower bound of the largest rank's bytes over all divisions of layers into stages.

        `gathered`: see `PlanMemories.least`.
        """
        least = self.memories.least(self.sizes(plan), policy, gathered=gathered)
        return (least + self.hardware.reserved) * ROUNDING

    @cached_property
    def memories(self) -> PlanMemories:
        """The `PlanMemories` of the model, which predicts its memory under any plan."""
        return self.model.memories()

    def _parameters_of(self, plan: Plan) -> tuple[LayerParameters, ...]:
        """Return trained parameters on a rank of `tp`, `ep` and `etp`: all, and of each kind of layer."""
        key = plan.tp, plan.ep, plan.etp
        if key not in self._parameters:
            sizes = self.sizes(plan)
            parts = (self.model.kinds, *((kind,) for kind in self._counts))
            self._parameters[key] = tuple(
                LayerParameters(sizes.trained_parameters(kinds), sizes.expert_parameters(kinds))
                for kinds in parts
            )
        return self._parameters[key]


def pipeline_seconds(total: float, plan: Plan, part: float, hops: float, last: float = 0.0) -> float:
    """Return a lower bound of a step's seconds for one stage per rank, over all divisions of `total`.

    Let stage r take x_r for a micro-batch, of which the fraction φ (`part`) at least passes on every stage
    before rank r can start, or can be done after it ends, and r · `hops` for messages; and let the part ω
    (`last`) of its last micro-batch be left when others go on. Then a step takes
    T ≥ φ · (x_0 + … + x_{r−1}) + r · hops + (m − ω) · x_r for every r. So x_0 + … + x_r is at most what it is
    where all are equations: linear in T, with the coefficients computed here. The least T makes it `total`.
    """
    count, slope, offset = plan.microbatches - last, 0.0, 0.0
    keep = 1 - part / count
    for rank in range(plan.pp):
        slope, offset = keep * slope + 1 / count, keep * offset + rank * hops / count
    return (total + offset) / slope


def least_ends(step: StepTimes) -> list[float]:
    """Return for each rank a lower bound of the seconds from the step's start to its last action's end.

    A rank waits for the forwards of the stages before its first, and then does all its work. Where backwards
    are whole, those of the stages before follow its last, or that one's input gradient.
    """
    schedule, passes = step.schedule, step.passes
    first, hop = step.timer.shape.plan.sends_inputs_first, step.timer.message_seconds
    before, ends, count = 0.0, [], step.timer.shape.plan.microbatches
    for rank in range(schedule.ranks):
        own = schedule.stages_of(rank)
        work = sum(passes[stage].total.total for stage in own)
        rounding = NANOSECOND * (1.5 * count * len(own) + rank)
        ends.append((before + count * work - rounding) * ROUNDING)
        before += passes[rank].forward.total + hop
    if schedule.policy in WHOLE:
        sent = 0.0  # when the rank behind sends its last gradient
        for rank in reversed(range(schedule.ranks)):
            weights = passes[rank].weights.total if first else 0.0
            before = passes[rank].backward - weights + hop - 2 * NANOSECOND
            sent = max(ends[rank] - weights - NANOSECOND, (sent + before) * ROUNDING)
            ends[rank] = max(ends[rank], sent + weights - NANOSECOND)
    return [end / step.timer.speedup for end in ends]


@dataclass(frozen=True)
class ScheduledActions:
    """The timed actions of a step, shared by plans with the same schedule and the same layer times."""

    times: StepTimes

    @property
    def latest(self) -> Mapping[StepEndSizes, float]:
        """The latest end of last actions, in seconds, of the ranks with equal work after it, by that work."""
        return self.times.latest

    @cached_property
    def least(self) -> Mapping[StepEndSizes, float]:
        """Lower bounds of the seconds in `latest`, without a simulation."""
        return latest_ends(self.times.work, least_ends(self.times))


@dataclass(frozen=True)
class PlanSteps:
    """Predicts steps and memory of plans of one model; equal parts of plans are computed once."""

    bounds: Bounds
    _pipelines: dict[tuple[object, ...], CutPipeline] = field(default_factory=dict)
    _steps: dict[tuple[object, ...], ScheduledActions] = field(default_factory=dict)

    def pipeline(self, plan: Plan) -> CutPipeline:
        """Return the schedule and the layers per stage of a plan, as `predict` chooses them."""
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches)
        if key not in self._pipelines:
            self._pipelines[key] = cut_pipeline(plan, self.bounds.model.costs_for_cut(plan))
        return self._pipelines[key]

    def step(self, plan: Plan) -> ScheduledActions:
        """Return the timed actions of a plan's step, without the optimizer's; equal steps are timed once."""
        timer, pipeline = self.bounds.timer(plan), self.pipeline(plan)
        assert not isinstance(plan.recompute, tuple)
        schedule = pipeline.schedule
        ends = {hides_sums(timer.shape, schedule, stage) for stage in (0, schedule.stages - 1)}
        layers = tuple(
            timer.times(kind, plan.recompute, at_once=at_once)
            for at_once in sorted(ends)
            for kind in dict.fromkeys(self.bounds.model.kinds)
        )
        divided = plan.tp, plan.ep, plan.etp
        key = (plan.schedule, plan.chunks, plan.pp, plan.microbatches, divided, layers, timer.message_seconds)
        if key not in self._steps:
            stages = stage_kinds(self.bounds.model.kinds, pipeline.cut)
            modes = stage_modes(plan, pipeline.cut)
            self._steps[key] = ScheduledActions(StepTimes(timer, schedule, stages, modes))
        return self._steps[key]

    def owner_seconds(self, plan: Plan) -> float:
        """Return the seconds that updates of whole parameters, as by Muon, add to a step; 0 without any."""
        owners = self.bounds.model.owners(plan, self.pipeline(plan).cut)
        timer = self.bounds.timer(plan)
        return max((sum(owner_seconds(timer, one)) for one in owners), default=0.0)

    def prediction(self, plan: Plan) -> Prediction:
        """Return the predicted time and memory of a plan's step, as `predict` does."""
        bounds, rows = self.bounds, self.bounds.batch // plan.dp
        return prediction_of(bounds.model, plan, bounds.hardware, rows, self.pipeline(plan), bounds.memories)

    def memory_at_once(self, plan: Plan) -> float | None:
        """Return the bytes that the largest rank allocates, or None where only a simulation tells."""
        return self.bounds.memories.at_once(self.bounds.sizes(plan), self.pipeline(plan))

    def least_memory(self, plan: Plan) -> float:
        """Return a lower bound of the largest rank's bytes, given the plan's schedule and stages."""
        known = self.memory_at_once(plan)
        if known is not None:
            return known
        return self.bounds.memories.least_of_cut(self.bounds.sizes(plan), self.pipeline(plan)) * ROUNDING

    def memory(self, plan: Plan) -> float:
        """Return the bytes that the largest rank allocates, by a simulation if need be."""
        ranks = self.bounds.memories.ranks(self.bounds.sizes(plan), self.pipeline(plan), 0.0)
        return max(rank.allocated for rank in ranks)
