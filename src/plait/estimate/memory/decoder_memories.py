"""`DecoderMemories`: the memory of plans of a decoder, from its sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.estimate.memory.memory_bounds import MemoryBounds
from plait.estimate.memory.memory_by_size import ActivationMemories, RankActivations
from plait.estimate.memory.plan_memories import CutPipeline, PlanMemories, PredictedMemory
from plait.estimate.memory.state_memory import ParameterCounts
from plait.estimate.time.layer_operations import MicrobatchShape
from plait.estimate.time.layer_work import MicrobatchSizes
from plait.estimate.time.step_times import stage_kinds, stage_modes
from plait.plan.model_sizes import Decoder, LayerKind
from plait.schedules.held_microbatches import HeldCounts, HeldMicrobatches
from plait.schedules.schedule import Schedule


@dataclass(frozen=True)
class DecoderMemories(PlanMemories):
    """Computes the memory of plans of a decoder; those of equal layers and schedules share it."""

    decoder: Decoder
    bounds: MemoryBounds
    _largest: dict[tuple[object, ...], tuple[HeldCounts, ...]] = field(default_factory=dict)
    _kept: dict[tuple[object, ...], tuple[RankActivations, ...]] = field(default_factory=dict)

    def least(self, sizes: MicrobatchSizes, policy: str | None, *, gathered: bool = True) -> float:
        """Return bytes that some rank must allocate, see `MemoryBounds.least`."""
        return self.bounds.least(_of_decoder(sizes), policy, gathered=gathered)

    def at_once(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> float:
        """Return the most bytes that a rank allocates."""
        shape = _of_decoder(sizes)
        return max(rank.with_state(shape, 0.0).allocated for rank in self._activations(shape, pipeline))

    def ranks(
        self, sizes: MicrobatchSizes, pipeline: CutPipeline, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank of `pp`."""
        shape = _of_decoder(sizes)
        known = self._memories(shape, pipeline)
        ranks = HeldMicrobatches(pipeline.schedule).ranks
        return tuple(known.activations(rank).with_state(shape, reserved) for rank in ranks)

    def _memories(self, shape: MicrobatchShape, pipeline: CutPipeline) -> ActivationMemories:
        stages = stage_kinds(self.decoder.kinds, pipeline.cut)
        return ActivationMemories(shape, pipeline.schedule, stages, stage_modes(shape.plan, pipeline.cut))

    def _activations(self, shape: MicrobatchShape, pipeline: CutPipeline) -> tuple[RankActivations, ...]:
        """Return what the ranks keep; those of equal sizes count as one."""
        plan = shape.plan
        order = plan.schedule, plan.chunks, plan.pp, plan.microbatches
        key = (*order, plan.tp, plan.cp, shape.rows, plan.sequence_parallel, plan.recompute)
        if key not in self._kept:
            known = self._memories(shape, pipeline)
            if order not in self._largest:
                self._largest[order] = _largest_ranks(pipeline.schedule, known.stages)
            most: dict[tuple[ParameterCounts, bool], RankActivations] = {}
            for rank in map(known.activations, self._largest[order]):
                alike = rank.sizes, rank.splits
                most[alike] = rank.joined(most[alike]) if alike in most else rank
            self._kept[key] = tuple(most.values())
        return self._kept[key]


def _of_decoder(sizes: MicrobatchSizes) -> MicrobatchShape:
    assert isinstance(sizes, MicrobatchShape)
    return sizes


def _largest_ranks(schedule: Schedule, stages: Sequence[Sequence[LayerKind]]) -> tuple[HeldCounts, ...]:
    """Return the ranks that may have most memory: of those with equal stages the ones that hold most."""
    messages = [schedule.exchanges_before(stage) for stage in range(schedule.stages)] + [False]
    alike = [
        tuple((stages[stage], messages[stage], messages[stage + 1]) for stage in schedule.stages_of(rank))
        for rank in range(schedule.ranks)
    ]
    return tuple(HeldMicrobatches(schedule).largest(alike))
