"""`TracedMemories`: the memory of plans of any model, from simulated steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from plait.estimate.memory.memory_report import Category, RankMemory
from plait.estimate.memory.model_traces import ModelTraces
from plait.estimate.memory.plan_memories import CutPipeline, PlanMemories, PredictedMemory
from plait.estimate.memory.state_memory import ParameterCounts, state_bytes
from plait.estimate.prediction.traced_layers import TracedLayers, TracedSizes
from plait.estimate.time.layer_work import MicrobatchSizes

SIMULATED = 4
"""Up to so many micro-batches for each stage are simulated: more add only to the memory of the batch."""


@dataclass(frozen=True, eq=False)
class TracedMemories(PlanMemories):
    """Computes the memory of plans as `plait.memory` does: by a step that is simulated on a ledger."""

    layers: TracedLayers

    def least(self, sizes: MicrobatchSizes, policy: str | None, *, gathered: bool = True) -> float:
        """Return the mean over ranks of state that is kept, and of what layers save for one micro-batch."""
        assert isinstance(sizes, TracedSizes)
        plan = sizes.plan
        saved = sizes.linear(_saved) if plan.recompute == "none" else 0.0
        if plan.offload != "none":
            return saved / plan.pp
        kinds, shards = self.layers.kinds, 1 if sizes.kind.keeps_parameters else sizes.state_ranks
        trained = sizes.trained_parameters(kinds)
        parameters, gradients, optimizer, _ = state_bytes(sizes, ParameterCounts(trained, 0.0, 0.0))
        frozen = sizes.frozen_parameters(kinds) * sizes.item / shards
        return (parameters + gradients * gathered + optimizer + frozen + saved) / plan.pp

    def at_once(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> None:
        """Return None: a step is simulated for each plan."""

    def ranks(
        self, sizes: MicrobatchSizes, pipeline: CutPipeline, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank of `pp`; many micro-batches follow from fewer."""
        assert isinstance(sizes, TracedSizes)
        count, few = sizes.plan.microbatches, SIMULATED * pipeline.schedule.stages
        if count <= few + pipeline.schedule.ranks:
            return self._simulated(sizes, pipeline, count, reserved)
        more = few + pipeline.schedule.ranks
        pair = [self._simulated(sizes, pipeline, one, reserved) for one in (few, more)]
        factor = (count - few) / (more - few)
        return tuple(_further(one, two, factor) for one, two in zip(*pair, strict=True))

    def _simulated(
        self, sizes: TracedSizes, pipeline: CutPipeline, microbatches: int, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank in a step of so many micro-batches."""
        plan = replace(sizes.plan, microbatches=microbatches, layers_per_stage=pipeline.cut)
        estimator = self.layers.estimator(round(sizes.rows * microbatches), on_cpu=sizes.on_cpu)
        return tuple(_predicted(rank, reserved) for rank in estimator.ranks(plan))


def _saved(traces: ModelTraces) -> float:
    """Return the bytes that layers allocate in a forward and save for its backward."""
    forwards = (trace.forward for trace in traces.layers)
    return sum(one.allocated.get(number, 0) for one in forwards for number in one.saved)


def _predicted(rank: RankMemory, reserved: float) -> PredictedMemory:
    used = rank.at_peak
    parameters, gradients, optimizer = (
        used[name] for name in (Category.PARAMETERS, Category.GRADIENTS, Category.STATE)
    )
    kept = sum(used[name] for name in (Category.ACTIVATIONS, Category.MESSAGES, Category.BATCH))
    running = rank.most - parameters - gradients - optimizer - kept
    return PredictedMemory(parameters, gradients, optimizer, kept, running, reserved)


def _further(one: PredictedMemory, two: PredictedMemory, factor: float) -> PredictedMemory:
    """Return what lies `factor` times as far from `one` as `two` does."""
    pairs = ((getattr(one, part.name), getattr(two, part.name)) for part in fields(one))
    return PredictedMemory(*(first + factor * (second - first) for first, second in pairs))
