"""Memory of each rank of a plan, from sizes alone: state, activations in flight, and temporary memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from plait.plan import Recompute
from plait.prediction.decoder import LayerKind
from plait.prediction.layer_operations import ITEM, StepShape
from plait.schedules.held_microbatches import HeldMicrobatches
from plait.schedules.schedule import Schedule


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes that a rank of `pp` allocates at the peak of a step, by use."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Activations that unfinished micro-batches keep for their backward."""
    temporary: float
    """The largest temporary memory of one layer while it runs, and gathered parameters."""
    reserved: float
    """Memory of the driver, of communicators and of fragmentation, which no tensor allocates."""

    @property
    def allocated(self) -> float:
        """The sum of all but `reserved`."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer keeps for the backward of a micro-batch."""

    until_inputs: float
    """Kept from the layer's forward to the end of its input gradient."""
    until_weights: float
    """Kept from the end of the input gradient to that of the weight gradient, where `W` is an action."""
    running: float
    """Temporary bytes while the layer's backward or the loss runs."""


def layer_memory(kind: LayerKind, recompute: Recompute, shape: StepShape) -> LayerMemory:
    """Return the activation memory of a layer of `kind` for one micro-batch, on the largest rank of `tp`."""
    if kind == "embedding":
        return LayerMemory(shape.tokens * 8, shape.activation, 0.0)
    if kind == "head":
        logits = shape.tokens * shape.decoder.vocab / shape.plan.tp
        # A copy in fp32 is kept, and the backward makes two more, or half a one for pieces of logits.
        copies = shape.item if shape.framework.fused_loss else 12 if shape.plan.tp == 1 else 6
        running = logits * (shape.item + copies)
        kept = shape.outside + _region_input(shape) + _norm(shape)
        if shape.plan.loss_rows is not None:
            chunk = min(logits, logits * shape.plan.loss_rows / shape.tokens)
            # Logits become their gradient in place, in 16 bits with a copy in fp32.
            running = chunk * (shape.item + 4 if shape.item < 4 else shape.item)
            return LayerMemory(kept, 0.0, running + _region_input(shape))
        return LayerMemory(kept, _region_input(shape) + logits * shape.item, running)
    saved, products, gradients = _kept(kind, shape)
    dropped = shape.outside / shape.item if shape.dropout else 0.0
    whole = shape.outside + _norm(shape) + _region_input(shape) + saved + dropped
    later = _region_input(shape) + products + gradients
    if recompute == "full" and shape.framework.recomputes_blocks:
        attention = layer_memory("attention", "none", shape).until_inputs
        kept = shape.outside if kind == "attention" else 0.0
        return LayerMemory(kept, later, whole + gradients + (attention if kind == "mlp" else 0.0))
    if recompute == "full":
        return LayerMemory(shape.outside, later, whole + gradients)
    if recompute == "selective":
        if shape.framework.recomputes_attention_only:
            kept = whole - (_scores(shape) if kind == "attention" else 0.0)
        elif kind == "attention":
            kept = shape.outside + saved
        else:
            kept = shape.outside + products * (2 if shape.decoder.gated else 1)
        return LayerMemory(kept, later, whole - kept + gradients)
    return LayerMemory(whole, later, gradients)


def _norm(shape: StepShape) -> float:
    """Return the bytes that a norm keeps besides its input and output: copies in fp32, where not fused."""
    if shape.framework.fused_norm or shape.decoder.biases:
        return 0.0
    return 2 * shape.outside * 4 / shape.item


def _region_input(shape: StepShape) -> float:
    """Return the bytes of the input of a region's linears that are kept: whole, or a piece gathered again."""
    return shape.outside if shape.plan.sequence_parallel == "regather" else shape.activation


def _kept(kind: LayerKind, shape: StepShape) -> tuple[float, float, float]:
    """Return bytes that a region needs: saved activations, the last linear's input, and gradients."""
    decoder, tp = shape.decoder, shape.plan.tp
    unit = shape.tokens * shape.item
    if kind == "attention":
        own = decoder.hidden / tp
        keys = shape.key_features
        statistics = 4 * shape.tokens * decoder.heads / tp if shape.framework.fused_attention else 0.0
        saved = unit * (2 * own + 2 * keys) + statistics + _scores(shape)
        return saved, unit * own, unit * (own + 2 * keys) + shape.outside
    inner = decoder.inside / tp
    # Gate, its activation, the other half, and their product.
    gated = 3 if shape.framework.fused_gate else 4
    return (
        unit * inner * (gated if decoder.gated else 2),
        unit * inner,
        unit * inner * (2 if decoder.gated else 1) + shape.outside,
    )


def _scores(shape: StepShape) -> float:
    """Return the bytes that unfused attention keeps: weights, and with dropout their mask and result."""
    if shape.framework.fused_attention:
        return 0.0
    decoder, plan = shape.decoder, shape.plan
    matrix = shape.rows * decoder.heads / plan.tp * decoder.context * decoder.context / plan.cp
    return matrix * (2 * shape.item + 1 if shape.framework.attention_dropout else shape.item)


class RankActivations(NamedTuple):
    """Activation memory and parameter counts of a rank, from which a strategy gives the whole memory."""

    parameters: float
    """Of the rank's stages, before sharding."""
    largest: float
    """Parameters of the largest layer."""
    kept: float
    """The peak of the activations that unfinished micro-batches keep."""
    running: float
    """The largest temporary memory of a layer."""

    def with_state(self, shape: StepShape, reserved: float) -> PredictedMemory:
        """Return the rank's memory with parameters, gradients and optimizer state as the plan shards them."""
        parameters, gradients, optimizer, gathered = state_bytes(shape, self.parameters, self.largest)
        return PredictedMemory(parameters, gradients, optimizer, self.kept, self.running + gathered, reserved)


def predicted_memory(
    shape: StepShape,
    schedule: Schedule,
    stages: Sequence[Sequence[LayerKind]],
    recompute: Sequence[Sequence[Recompute]],
    reserved: float,
) -> tuple[PredictedMemory, ...]:
    """Return the memory of each rank of `pp`; `stages` has the kinds of the layers of each stage."""
    ranks = rank_activations(shape, HeldMicrobatches(schedule), stages, recompute)
    return tuple(rank.with_state(shape, reserved) for rank in ranks)


def rank_activations(
    shape: StepShape,
    held: HeldMicrobatches,
    stages: Sequence[Sequence[LayerKind]],
    recompute: Sequence[Sequence[Recompute]],
) -> tuple[RankActivations, ...]:
    """Return the activations of each rank of `pp`, and the sizes of its layers."""
    at_once = [shape.framework.weights_at_once(shape.plan, stage) for stage in range(len(stages))]
    known, decoder, tp = _LayerMemories(shape), shape.decoder, shape.plan.tp
    layers = [known.of_stage(kinds, modes) for kinds, modes in zip(stages, recompute, strict=True)]
    peaks = activation_peaks(held, layers, at_once)
    sizes: dict[tuple[Sequence[LayerKind], ...], tuple[float, float, float]] = {}
    found = []
    for rank in range(held.schedule.ranks):
        own = held.schedule.stages_of(rank)
        kinds = tuple(stages[stage] for stage in own)
        if kinds not in sizes:
            each = {kind: decoder.parameters(kind, tp) for kind in {*chain(*kinds)}}
            count = decoder.parameters_of([*chain(*kinds)], tp)
            sizes[kinds] = count, max(each.values()), _placeholders(shape, count, each)
        count, largest, placeholders = sizes[kinds]
        running = max(layers[stage].running for stage in own) + placeholders
        found.append(RankActivations(count, largest, peaks[rank], running))
    return tuple(found)


def _placeholders(shape: StepShape, count: float, each: Mapping[LayerKind, float]) -> float:
    """Return the bytes of `Framework.placeholder_gradients` of `count` parameters; `each`: of one layer."""
    kept = shape.framework.placeholder_gradients
    if kept == "none":
        return 0.0
    sizes = sum(parameters for kind, parameters in each.items() if kind != "embedding")
    return shape.item * (count if kept == "all" else sizes)


@dataclass(frozen=True)
class _LayerMemories:
    """The memory of layers and stages of one shape; equal ones are computed once."""

    shape: StepShape
    layers: dict[tuple[LayerKind, Recompute], LayerMemory] = field(default_factory=dict)
    stages: dict[tuple[tuple[LayerKind, Recompute], ...], LayerMemory] = field(default_factory=dict)

    def of_stage(self, kinds: Sequence[LayerKind], modes: Sequence[Recompute]) -> LayerMemory:
        """Return what all layers of a stage keep, and the largest that one takes while it runs."""
        stage = tuple(zip(kinds, modes, strict=True))
        if stage not in self.stages:
            for kind in {*stage} - {*self.layers}:
                self.layers[kind] = layer_memory(*kind, self.shape)
            found = [self.layers[kind] for kind in stage]
            self.stages[stage] = LayerMemory(
                sum(one.until_inputs for one in found),
                sum(one.until_weights for one in found),
                max(one.running for one in found),
            )
        return self.stages[stage]


def activation_peaks(
    held: HeldMicrobatches, stages: Sequence[LayerMemory], layer_by_layer: Sequence[bool]
) -> tuple[float, ...]:
    """Return each rank's peak of kept activations in bytes, by the order of its actions.

    `layer_by_layer`: for each stage, whether a full backward computes each layer's weight gradient at once;
    else those of a stage follow all its input gradients, see `Plan.overlap`.
    """
    until_input = [round(stage.until_inputs) for stage in stages]
    until_weight = [
        0 if at_once and not held.schedule.splits else round(stage.until_weights)
        for stage, at_once in zip(stages, layer_by_layer, strict=True)
    ]
    return tuple(map(float, held.peak_memory(until_input, until_weight)))


def state_bytes(shape: StepShape, count: float, largest: float) -> tuple[float, float, float, float]:
    """Return four sizes in bytes of a rank: parameters, gradients, optimizer state, gathered buffers.

    `count`: the rank's parameters before sharding; `largest`: the parameters of its largest layer.
    """
    plan = shape.plan
    compute = ITEM[plan.precision or "fp32"]
    master = ITEM[plan.master_precision or plan.precision or "fp32"]
    ranks = plan.state_ranks if plan.strategy != "none" else 1
    moments = shape.framework.moment_bytes
    moments = 2 * master if moments is None else moments
    optimizer = count / ranks * (moments + (master if plan.has_master else 0))
    sharded = plan.strategy in ("gradients", "full") and plan.reduce == "each"
    gradients = count * shape.gradient_item / (ranks if sharded else 1)
    gathered = largest * shape.gradient_item if sharded and ranks > 1 else 0.0
    if plan.strategy != "full" or ranks == 1:
        return count * compute, gradients, optimizer, gathered
    # The layer that runs and the next one are whole.
    return count * compute / ranks, gradients, optimizer, gathered + 2 * largest * compute
