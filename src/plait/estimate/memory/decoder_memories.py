"""`DecoderMemories`: the memory of plans of a decoder, from its sizes alone, without a simulated step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import NamedTuple, TypeAlias

from plait.estimate.memory.decoder_layer_memory import LayerMemory, layer_memory
from plait.estimate.memory.memory_bounds import MemoryBounds
from plait.estimate.memory.plan_memories import CutPipeline, PlanMemories, PredictedMemory
from plait.estimate.memory.state_memory import (
    ParameterCounts,
    rank_parameter_counts,
    state_bytes,
    whole_gradients,
)
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.layer_work import MicrobatchSizes
from plait.estimate.time.step_times import stage_kinds, stage_modes
from plait.plan.decoder_sizes import Decoder, LayerKind
from plait.plan.plan import Recompute
from plait.schedules.action import Kind
from plait.schedules.held_microbatches import HeldCounts, HeldMicrobatches
from plait.schedules.schedule import Schedule


class ActivationPeak(NamedTuple):
    """Bytes of activations on a rank at a peak: of unfinished micro-batches, and of the running action."""

    kept: float
    """What unfinished micro-batches keep when the action starts, with messages."""
    running: float
    """The most that the action allocates beside it."""


PeakKey: TypeAlias = tuple[Kind, bool]
"""The kind of an action; whether the weight gradients of all layers may be allocated while it runs: after a
backward, and while the last layer of the first one runs."""


@dataclass(frozen=True)
class RankActivations:
    """Activation memory and parameter counts of a rank, before a sharding strategy is chosen."""

    sizes: ParameterCounts
    peaks: Mapping[PeakKey, ActivationPeak]

    @property
    def splits(self) -> bool:
        """Whether the schedule runs weight gradients apart from input gradients, as zero-bubble ones do."""
        return any(kind is Kind.W for kind, _ in self.peaks)

    def with_state(self, shape: MicrobatchSizes, reserved: float) -> PredictedMemory:
        """Return the rank's predicted memory: activations with parameters, gradients and optimizer state."""
        parameters, gradients, optimizer, gathered = state_bytes(shape, self.sizes)
        added = whole_gradients(shape, self.sizes, splits=self.splits)
        peaks = [(added.after_backward(Kind.F), 0.0, 0.0)]
        for (kind, after), peak in self.peaks.items():
            peaks.append((added.after_backward(kind) if after else added.of_layers(kind), *peak))
        in_use, kept, running = max(peaks, key=sum)
        return PredictedMemory(parameters, gradients + in_use, optimizer, kept, running + gathered, reserved)

    def joined(self, other: RankActivations) -> RankActivations:
        """Return, for each kind of action, the larger of the peaks of two ranks with equal parameters."""
        peaks = {**self.peaks}
        for key, peak in other.peaks.items():
            peaks[key] = max(peak, peaks.get(key, peak), key=sum)
        return RankActivations(self.sizes, peaks)


@dataclass(frozen=True)
class ActivationMemories:
    """Computes the bytes of activations of each pipeline rank; equal stages are computed once."""

    shape: MicrobatchShape
    schedule: Schedule
    stages: Sequence[Sequence[LayerKind]]
    recompute: Sequence[Sequence[Recompute]]
    _layers: dict[tuple[LayerKind, Recompute], LayerMemory] = field(default_factory=dict)
    _stages: dict[tuple[object, ...], StageMemory] = field(default_factory=dict)
    _sizes: dict[tuple[Sequence[LayerKind], ...], ParameterCounts] = field(default_factory=dict)

    def activations(self, rank: HeldCounts) -> RankActivations:
        """Return a rank's peaks of activations, and its parameter counts."""
        kinds = tuple(self.stages[stage] for stage in rank.stages)
        if kinds not in self._sizes:
            self._sizes[kinds] = rank_parameter_counts(self.shape, kinds)
        own = [self._stage(stage) for stage in rank.stages]
        received, sent = self.messages(rank)
        return RankActivations(self._sizes[kinds], activation_peaks(rank, own, received, sent))

    def messages(self, rank: HeldCounts) -> tuple[float, float]:
        """Return the bytes of a rank's receive buffers, and of messages its first backwards send."""
        return rank.receive_buffers * self.shape.outside, rank.sending * self.shape.outside

    def layer(self, kind: LayerKind, recompute: Recompute) -> LayerMemory:
        """Return the activation memory of a layer of `kind` for one micro-batch."""
        return layer_memory(kind, recompute, self.shape)

    def stage(self, layers: Sequence[LayerMemory], *, at_once: bool, receives: bool) -> StageMemory:
        """Return the activation memory of a stage with these layers for one micro-batch."""
        return stage_memory(layers, at_once=at_once, receives=receives)

    def _stage(self, stage: int) -> StageMemory:
        schedule = self.schedule
        receives = stage + 1 < schedule.stages and schedule.exchanges_before(stage + 1)
        at_once = self.shape.plan.weights_at_once(sends=schedule.exchanges_before(stage))
        layers = tuple(zip(self.stages[stage], self.recompute[stage], strict=True))
        if (layers, at_once, receives) not in self._stages:
            for kind in {*layers} - {*self._layers}:
                self._layers[kind] = self.layer(*kind)
            found = [self._layers[kind] for kind in layers]
            self._stages[layers, at_once, receives] = self.stage(found, at_once=at_once, receives=receives)
        return self._stages[layers, at_once, receives]


def activation_peaks(
    rank: HeldCounts, stages: Sequence[StageMemory], received: float, sent: float
) -> dict[PeakKey, ActivationPeak]:
    """Return a rank's peak bytes of activations by kind of action, before and after the first backward.

    `stages`: the memory of the rank's stages; `received`, `sent`: bytes of messages, the latter after a
    backward.
    """
    sizes = [*(one.until_inputs for one in stages), *(one.until_weights for one in stages)]
    peaks: dict[PeakKey, ActivationPeak] = {}
    for (place, kind, after), most in rank.starts.items():
        kept = max(sum(map(mul, held, sizes)) for held in most) + received + (sent if after else 0.0)
        found = [(after, stages[place].most[kind])]
        if not after and kind is not Kind.F:
            found.append((True, stages[place].last[kind]))
        for whole_gradients_in_use, running in found:
            key, peak = (kind, whole_gradients_in_use), ActivationPeak(kept, running)
            peaks[key] = max(peak, peaks.get(key, peak), key=sum)
    return peaks


@dataclass(frozen=True)
class StageMemory:
    """A stage's activation memory for a micro-batch: bytes kept for the backward, and peaks of its passes."""

    until_inputs: float
    """Kept from the forward to the end of the input gradient."""
    until_weights: float
    """Kept from the end of the input gradient to that of the weight gradient, where `W` is an action."""
    most: Mapping[Kind, float]
    """The most that an action of each kind allocates: a forward beside what it keeps in the end, a backward
    beside what is kept when it starts."""
    last: Mapping[Kind, float]
    """The same of a backward while all weight gradients may be allocated, as its last layer runs."""


def stage_memory(layers: Sequence[LayerMemory], *, at_once: bool, receives: bool) -> StageMemory:
    """Return the activation memory of a stage for one micro-batch, given its layers', first layer first.

    `at_once`: full backwards compute each layer's weight gradient at once, else after all input gradients.
    `receives`: the last output's gradient is in a receive buffer, which is counted apart.
    """
    kept = forward = 0.0
    for layer in layers:
        forward = max(forward, kept + layer.forward)
        kept += layer.until_inputs
    # Relative to the start of the action: `left` is what the layers until then have left allocated.
    inputs, both, weights = [], [], []
    left = left_at_once = left_of_weights = 0.0
    received = layers[-1].gradient if receives else 0.0
    for layer, before in zip(reversed(layers), [*reversed(layers[:-1]), None], strict=True):
        running = layer.gradient - received + layer.backward
        later, received = layer.until_weights - received, 0.0
        inputs.append(left + running)
        weighing = later + layer.weights - layer.until_inputs + (before.gradient if before else 0.0)
        both.append(max(running, weighing) + left_at_once)
        weights.append(left_of_weights + layer.weights)
        left += later - layer.until_inputs
        left_at_once -= layer.until_inputs
        left_of_weights -= later
    if not at_once:  # its last part: the last input gradient, and all weight gradients
        both = [*inputs, max(inputs[-1], left + max(weights))]
    backwards = {Kind.I: inputs, Kind.W: weights, Kind.B: both}
    most = {kind: max(added) for kind, added in backwards.items()}
    last = {kind: added[-1] for kind, added in backwards.items()}
    return StageMemory(kept, -left_of_weights, {Kind.F: forward - kept, **most}, last)


@dataclass(frozen=True)
class DecoderMemories(PlanMemories):
    """Predicts the memory of plans of a decoder from its sizes; equal parts of plans are computed once."""

    decoder: Decoder
    _largest: dict[tuple[object, ...], tuple[HeldCounts, ...]] = field(default_factory=dict)
    _kept: dict[tuple[object, ...], tuple[RankActivations, ...]] = field(default_factory=dict)

    @cached_property
    def _bounds(self) -> MemoryBounds:
        return MemoryBounds(self.decoder)

    def least(self, sizes: MicrobatchSizes, policy: str | None, *, gathered: bool = True) -> float:
        """Return a lower bound of the largest rank's bytes under a schedule policy (None: under any)."""
        return self._bounds.least(_of_decoder(sizes), policy, gathered=gathered)

    def at_once(self, sizes: MicrobatchSizes, pipeline: CutPipeline) -> float:
        """Return the bytes that the largest rank allocates at its peak."""
        shape = _of_decoder(sizes)
        return max(rank.with_state(shape, 0.0).allocated for rank in self._activations(shape, pipeline))

    def ranks(
        self, sizes: MicrobatchSizes, pipeline: CutPipeline, reserved: float
    ) -> tuple[PredictedMemory, ...]:
        """Return the memory of each rank of `pp`; `reserved`: bytes beside those of tensors."""
        shape = _of_decoder(sizes)
        known = self._memories(shape, pipeline)
        ranks = HeldMicrobatches(pipeline.schedule).ranks
        return tuple(known.activations(rank).with_state(shape, reserved) for rank in ranks)

    def _memories(self, shape: MicrobatchShape, pipeline: CutPipeline) -> ActivationMemories:
        stages = stage_kinds(self.decoder.kinds, pipeline.cut)
        return ActivationMemories(shape, pipeline.schedule, stages, stage_modes(shape.plan, pipeline.cut))

    def _activations(self, shape: MicrobatchShape, pipeline: CutPipeline) -> tuple[RankActivations, ...]:
        """Return the ranks' activation memory; ranks of equal sizes are computed once."""
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
