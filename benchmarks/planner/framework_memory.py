"""The memory of a published run, in 16 bits on GPUs: as plait's from sizes, with what its framework keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from frameworks import Framework

from plait.estimate.memory.decoder_layer_memory import LayerMemory, layer_memory
from plait.estimate.memory.decoder_memories import ActivationMemories, RankActivations, StageMemory
from plait.estimate.time.decoder_operations import MicrobatchShape, keys_read
from plait.plan.decoder_sizes import LayerKind
from plait.plan.plan import Recompute
from plait.schedules.held_microbatches import HeldCounts


@dataclass(frozen=True)
class FrameworkMemories(ActivationMemories):
    """Computes the bytes of activations of each pipeline rank, as a framework keeps them."""

    framework: Framework = field(kw_only=True)

    def activations(self, rank: HeldCounts) -> RankActivations:
        """Return a rank's peaks of activations, with its placeholder gradients, and its parameter counts."""
        found = super().activations(rank)
        kept = placeholder_gradients(self.shape, self.framework, [self.stages[one] for one in rank.stages])
        peaks = {key: peak._replace(running=peak.running + kept) for key, peak in found.peaks.items()}
        return replace(found, peaks=peaks)

    def messages(self, rank: HeldCounts) -> tuple[float, float]:
        """Return the bytes of a rank's receive buffers, and of what it sends after its first backwards."""
        if self.framework.blocking_messages:
            return rank.received * self.shape.outside, 0.0
        return super().messages(rank)

    def layer(self, kind: LayerKind, recompute: Recompute) -> LayerMemory:
        """Return the memory of a layer of `kind`."""
        return framework_layer(kind, recompute, self.shape, self.framework)

    def stage(self, layers: Sequence[LayerMemory], *, at_once: bool, receives: bool) -> StageMemory:
        """Return the memory of a stage; its ranks may keep only the shard of its output that they send."""
        if receives and self.framework.messages_divided:
            layers = [*layers[:-1], sending_parts(layers[-1], self.shape)]
        return super().stage(layers, at_once=at_once, receives=receives)


def placeholder_gradients(
    shape: MicrobatchShape, framework: Framework, stages: Sequence[Sequence[LayerKind]]
) -> float:
    """Return the bytes of `Framework.placeholder_gradients` of a rank with `stages`."""
    kinds, decoder, tp = [*chain(*stages)], shape.decoder, shape.plan.tp
    if framework.placeholder_gradients == "none":
        return 0.0
    if framework.placeholder_gradients == "all":
        return shape.item * decoder.parameters_of(kinds, tp)
    return shape.item * sum(decoder.parameters(kind, tp) for kind in {*kinds} - {"embedding"})


def sending_parts(last: LayerMemory, shape: MicrobatchShape) -> LayerMemory:
    """Return the memory of a stage's last layer, if each rank of `tp` keeps only the shard that it sends.

    See `Framework.messages_divided`; what one keeps of an output that is a shard already stays.
    """
    rest = shape.outside - shape.activation / shape.plan.tp
    return replace(last, until_inputs=max(last.until_inputs - rest, 0.0))


def framework_layer(
    kind: LayerKind, recompute: Recompute, shape: MicrobatchShape, framework: Framework
) -> LayerMemory:
    """Return the activation memory of a layer of `kind` for one micro-batch, on the largest rank of `tp`."""
    if kind == "embedding":
        return layer_memory(kind, recompute, shape)
    if kind == "head":
        return _head(shape, framework)
    if kind == "attention":
        found = _attention(recompute, shape, framework)
        return replace(found, until_inputs=0.0) if recompute == "full" else found
    found = _mlp(recompute, shape, framework)
    if recompute == "full":  # of the block
        block = _attention("none", shape, framework).until_inputs
        return replace(found, backward=found.backward + block)
    return found


def _head(shape: MicrobatchShape, framework: Framework) -> LayerMemory:
    plan, region = shape.plan, _region(shape)
    elements = shape.tokens * shape.decoder.vocab / plan.tp
    saved, logits, loss = _norm(shape) + region, elements * shape.item, _loss(shape, framework, elements)
    kept, gathered = saved + logits + loss.until_inputs, _gathered(shape) / 2
    forward = max(logits + saved + gathered / 2, kept + loss.forward - loss.until_inputs)
    passes = 2 * shape.activation + (shape.outside if plan.cuts_sequence else 0.0)
    backward = max(loss.backward, loss.gradient - loss.until_inputs + passes)
    return LayerMemory(kept, region + logits, forward, backward, gathered)


def _loss(shape: MicrobatchShape, framework: Framework, elements: float) -> LayerMemory:
    """Return the bytes of the cross-entropy beside the logits; `gradient`: theirs, if not in place."""
    logits, copy = elements * shape.item, 4 * elements
    if framework.fused_loss:
        return LayerMemory(0.0, 0.0, 0.0, logits, gradient=logits)
    if shape.plan.tp == 1:
        return LayerMemory(copy, 0.0, 2 * copy, 2 * copy, gradient=logits)
    return LayerMemory(copy, 0.0, copy, logits, gradient=logits)


def _attention(recompute: Recompute, shape: MicrobatchShape, framework: Framework) -> LayerMemory:
    decoder, plan = shape.decoder, shape.plan
    unit = shape.tokens * shape.item
    query, key = unit * decoder.hidden / plan.tp, unit * shape.key_features
    statistics = 4 * shape.tokens * decoder.heads / plan.tp if framework.fused_attention else 0.0
    scores = 0.0 if framework.fused_attention else _scores(shape)
    core = 2 * query + 2 * unit * keys_read(shape) + statistics + scores
    norm, region = _norm(shape), _region(shape)
    whole = shape.outside + norm + region + core
    kept = {"none": whole, "selective": shape.outside + core, "full": shape.outside}[recompute]
    if recompute == "selective" and framework.recomputes_attention_only:
        kept = whole - scores
    forward, ring_backward = whole + _sum(shape), 0.0
    if plan.cp > 1:  # a ring, whose sums of parts are in fp32
        ring = 3 * (plan.cp - 1) * key + statistics + shape.outside + 2 * query + key
        forward = max(forward, whole - shape.outside + ring)
        ring_backward = 4 * query + (5 + 5 * plan.cp) * key
    if recompute != "none":
        forward -= norm
        forward -= query + statistics if recompute == "full" and plan.cp == 1 else 0.0
    passes = 2 * shape.activation + (shape.outside if plan.cuts_sequence else 0.0) - statistics
    backward = max(2 * query + 2 * key, passes, ring_backward) + _bias(shape)
    again = 0.0 if recompute == "none" else whole - kept
    later = 2 * region + 2 * query + 2 * key
    return LayerMemory(kept, later, forward, backward + again, _gathered(shape), shape.outside)


def _scores(shape: MicrobatchShape) -> float:
    """Return the bytes that unfused attention keeps: weights, and their dropout's mask and result."""
    decoder, plan = shape.decoder, shape.plan
    matrix = shape.rows * decoder.heads / plan.tp * decoder.context * decoder.context / plan.cp
    return matrix * (2 * shape.item + 1)


def _mlp(recompute: Recompute, shape: MicrobatchShape, framework: Framework) -> LayerMemory:
    decoder, plan = shape.decoder, shape.plan
    wide = shape.tokens * shape.item * decoder.inside / plan.tp
    norm, region = _norm(shape), _region(shape)
    # Gate, its activation, the other half, and their product.
    inside = (3 if framework.fused_gate else 4) if decoder.gated else 2
    inputs = 2 if decoder.gated else 1
    whole = shape.outside + norm + region + inside * wide
    kept = {"none": whole, "selective": shape.outside + inputs * wide, "full": shape.outside}[recompute]
    if recompute == "selective" and framework.recomputes_attention_only:
        kept = whole
    forward = whole + _sum(shape)
    if recompute != "none":
        first = inside - (recompute == "full") if decoder.gated else 2
        last = 1 if recompute == "full" else 1 + inputs
        result = _sum(shape) + (shape.outside if plan.cuts_sequence else 0.0)
        forward = max(first * wide, last * wide + result) + (region if decoder.gated else 0.0)
    backward = (inside - 1 if decoder.gated else 2) * wide
    if plan.cuts_sequence:
        backward = max(backward, 2 * shape.activation + shape.outside)
    again = 0.0 if recompute == "none" else whole - kept
    later = 2 * region + (inputs + 1) * wide
    return LayerMemory(kept, later, forward, backward + _bias(shape) + again, _gathered(shape), shape.outside)


def _norm(shape: MicrobatchShape) -> float:
    """Return the bytes of the statistics that a norm keeps besides its input and output."""
    statistics = 4 * shape.tokens / (shape.plan.tp if shape.plan.cuts_sequence else 1)
    return 2 * statistics if shape.decoder.biases else statistics


def _region(shape: MicrobatchShape) -> float:
    """Return the bytes of the input of a region's linears that are kept: whole, or a shard gathered again."""
    return shape.outside if shape.plan.sequence_parallel == "regather" else shape.activation


def _sum(shape: MicrobatchShape) -> float:
    """Return the bytes of the last linear's output and of what its sum over `tp` allocates beside it."""
    return (3 if shape.plan.sequence_parallel == "regather" else 1) * shape.activation


def _gathered(shape: MicrobatchShape) -> float:
    """Return the bytes that a weight gradient gathers again: input and output gradient, each copied once."""
    return 4 * shape.activation if shape.plan.sequence_parallel == "regather" else 0.0


def _bias(shape: MicrobatchShape) -> float:
    """Return the bytes of a bias's gradient that is kept until all small gradients are added together."""
    return shape.item * shape.decoder.hidden if shape.decoder.biases else 0.0
