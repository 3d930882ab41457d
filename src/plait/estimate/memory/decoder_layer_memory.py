"""Formulas for the activation memory of a decoder layer: kept for the backward, and at most in each pass."""

from __future__ import annotations

from dataclasses import dataclass

from plait.estimate.time.decoder_operations import MicrobatchShape, context_method, keys_read
from plait.plan.decoder_sizes import LOSS_CHUNK_BYTES, LayerKind
from plait.plan.plan import Recompute


@dataclass(frozen=True)
class LayerMemory:
    """A layer's activation memory for a micro-batch: bytes kept for the backward, and peaks of its passes."""

    until_inputs: float
    """Kept from the forward to the end of the input gradient: the output and what is saved, not the input."""
    until_weights: float
    """Kept from the end of the input gradient to that of the weight gradient, with the output's gradient."""
    forward: float
    """The most that the forward allocates, with what it keeps; for the head with the loss."""
    backward: float
    """The most that the input gradient allocates beside what is kept and the output's gradient."""
    weights: float = 0.0
    """The most that the weight gradient allocates."""
    gradient: float = 0.0
    """The output's gradient; 0 for the head, which computes it."""


def layer_memory(kind: LayerKind, recompute: Recompute, shape: MicrobatchShape) -> LayerMemory:
    """Return the activation memory of a decoder's layer for one micro-batch, on the largest rank of `tp`."""
    if kind == "embedding":
        return _embedding(recompute, shape)
    if kind == "head":
        return _head(recompute, shape)
    return _attention(recompute, shape) if kind == "attention" else _mlp(recompute, shape)


def _embedding(recompute: Recompute, shape: MicrobatchShape) -> LayerMemory:
    decoder, plan, whole = shape.decoder, shape.plan, shape.activation
    indices = 8 * shape.tokens * (decoder.positions + (plan.tp > 1))
    table = decoder.context / plan.cp * decoder.hidden * shape.item if decoder.positions else 0.0
    looked_up = whole if decoder.positions or plan.tp > 1 else 0.0
    gathered = 0.0 if plan.tp == 1 else 2 * whole if plan.cuts_sequence else whole
    again = 0.0 if recompute == "none" or not decoder.positions else whole + (table if plan.tp == 1 else 0.0)
    return LayerMemory(
        shape.outside + (indices if recompute == "none" else 0.0),
        whole + table + indices,
        shape.outside + indices + looked_up + table,
        table + gathered + again,
        gradient=shape.outside,
    )


def _head(recompute: Recompute, shape: MicrobatchShape) -> LayerMemory:
    plan, region = shape.plan, _region(shape)
    elements = shape.tokens * shape.decoder.vocab / plan.tp
    saved = _norm(shape) + region
    again = recompute != "none"
    passes = shape.activation + (shape.outside if plan.cuts_sequence else 0.0) + (saved if again else 0.0)
    if plan.loss_rows is not None:
        # Logits of some rows become their gradient in place, in 16 bits with a copy in fp32.
        chunk = min(1.0, plan.loss_rows / shape.tokens) * elements
        chunk *= shape.item + 4 if shape.item < 4 else shape.item
        kept = shape.activation if again else saved
        passes += 0.0 if again else _norm(shape)
        return LayerMemory(kept, 0.0, kept, shape.activation + max(chunk, passes), _gathered(shape) / 2)
    logits = elements * shape.item  # which become their gradient in place
    kept = (0.0 if again else saved) + logits
    gathered = _gathered(shape) / 2
    product = logits + (region if again else saved) + gathered / 2
    forward = max(product, kept + _copy_for_loss(shape, elements))
    return LayerMemory(kept, region + logits, forward, shape.activation + passes, gathered)


def _copy_for_loss(shape: MicrobatchShape, elements: float) -> float:
    """Return the bytes of the float32 copy of 16-bit logits: of all at once if classes are partitioned."""
    if shape.item >= 4:
        return 0.0
    return 4 * elements if shape.plan.tp > 1 else min(4 * elements, LOSS_CHUNK_BYTES)


def _attention(recompute: Recompute, shape: MicrobatchShape) -> LayerMemory:
    decoder, plan = shape.decoder, shape.plan
    unit = shape.tokens * shape.item
    query, key = unit * decoder.hidden / plan.tp, unit * shape.key_features
    shared = unit * keys_read(shape)
    statistics = 4 * shape.tokens * decoder.heads / plan.tp
    core = 2 * query + 2 * shared + statistics
    repeats = _repeats_heads(shape) and key < query
    # A single head is repeated by a view.
    repeated = 2 * (query - key) if repeats and shape.key_features > decoder.head_size else 0.0
    turned = key if shape.composes and decoder.rotary else 0.0  # not yet turned
    joined = plan.cp == 1  # query, key and value are one product
    copied = query if turned and plan.cp == 1 else 0.0  # heads' outputs, side by side
    norm, region = _norm(shape), _region(shape)
    whole = shape.outside + norm + region + core + copied + repeated
    kept = {"none": whole, "selective": shape.outside + core, "full": shape.outside}[recompute]
    if turned and joined and recompute != "selective":
        turned += query + key
    forward, ring, ring_backward = whole + _sum(shape) + turned, 0.0, 0.0
    if plan.cp > 1:
        ring, ring_backward = _exchanged(shape, query, key, shared, statistics + turned)
        forward = max(forward, whole - shape.outside + ring)
    if recompute != "none":
        forward -= norm + (0.0 if plan.cuts_sequence else copied)
        forward -= query + statistics if recompute == "full" and plan.cp == 1 else 0.0
    given = shape.activation if plan.sequence_parallel == "keep" else 0.0
    backward = max(
        given + 2 * query + 2 * (query if repeats else key),
        given + 2 * shape.activation + (shape.outside if plan.cuts_sequence else 0.0) - statistics - copied,
        ring_backward,
    )
    if joined and not decoder.rotary:  # their gradients side by side, beside the input's
        backward = max(backward, given + shape.activation + query + 4 * key - 2 * shared - statistics)
    backward += _bias(shape)
    again = 0.0 if recompute == "none" else whole - kept
    later = 2 * region + 2 * query + 2 * key
    return LayerMemory(kept, later, forward, backward + again, _gathered(shape), shape.outside)


def _repeats_heads(shape: MicrobatchShape) -> bool:
    """Return whether attention repeats key heads for each query head, as it does in fp32 on GPUs."""
    return not shape.on_cpu and shape.plan.cp == 1 and shape.item == 4


def _exchanged(
    shape: MicrobatchShape, query: float, key: float, shared: float, others: float
) -> tuple[float, float]:
    """Return the most that attention over `cp` allocates: forward, beside what is kept, and backward."""
    plan, outside = shape.plan, shape.outside
    wide = shape.item < 4  # sums of parts are in fp32
    if context_method(shape) == "ulysses":
        backward = 6 * query + 6 * shared if wide else max(7 * query, 5 * query + 4 * shared)
        return 4 * query + 2 * key, backward
    forward = 3 * (plan.cp - 1) * key + others + outside + (2 * query + key if wide else 0.0)
    parts = (4.0, 5.0, 5.0) if wide else (2.5, 1.0, 4.5)
    return forward, parts[0] * query + (parts[1] + parts[2] * plan.cp) * key


def _mlp(recompute: Recompute, shape: MicrobatchShape) -> LayerMemory:
    decoder, plan = shape.decoder, shape.plan
    wide = shape.tokens * shape.item * decoder.inside / plan.tp
    norm, region = _norm(shape), _region(shape)
    # Gate, its activation, the other half, and their product.
    inside = 4 if decoder.gated else 2
    inputs = 2 if decoder.gated else 1
    whole = shape.outside + norm + region + inside * wide
    kept = {"none": whole, "selective": shape.outside + inputs * wide, "full": shape.outside}[recompute]
    forward = whole + _sum(shape)
    if recompute != "none":
        apart = plan.cp > 1  # gate and up are two products
        first = inside - (recompute == "full" and apart) if decoder.gated else 2
        last = 1 if recompute == "full" else 1 + inputs
        result = _sum(shape) + (shape.outside if plan.cuts_sequence else 0.0)
        forward = max(first * wide, last * wide + result) + (region if decoder.gated else 0.0)
    given = shape.activation if plan.sequence_parallel == "keep" else 0.0
    backward = given + (inside - 1 if decoder.gated else 2) * wide
    if plan.cuts_sequence:
        backward = max(backward, given + 2 * shape.activation + shape.outside)
    backward += _bias(shape)
    again = 0.0 if recompute == "none" else whole - kept
    later = 2 * region + (inputs + 1) * wide
    return LayerMemory(kept, later, forward, backward + again, _gathered(shape), shape.outside)


def _norm(shape: MicrobatchShape) -> float:
    """Return the bytes that a norm keeps besides its input and output: statistics, or copies in fp32."""
    statistics = 4 * shape.tokens / (shape.plan.tp if shape.plan.cuts_sequence else 1)
    if shape.decoder.biases:
        return 2 * statistics
    if not shape.composes:
        return statistics
    return statistics + (shape.outside if shape.item >= 4 else 8 * shape.outside / shape.item)


def _region(shape: MicrobatchShape) -> float:
    """Return the bytes of the input of a region's linears that are kept: whole, or a part gathered again."""
    return shape.outside if shape.plan.sequence_parallel == "regather" else shape.activation


def _sum(shape: MicrobatchShape) -> float:
    """Return the bytes of the last linear's output, with what its sum over `tp` allocates beside the result.

    With "regather" the gathered input is counted too, which a forward keeps until it ends.
    """
    times = {"none": 1, "keep": 2, "regather": 3}[shape.plan.sequence_parallel]
    return times * shape.activation


def _gathered(shape: MicrobatchShape) -> float:
    """Return the bytes that a weight gradient gathers again: input and output gradient, each copied once."""
    return 4 * shape.activation if shape.plan.sequence_parallel == "regather" else 0.0


def _bias(shape: MicrobatchShape) -> float:
    """Return the bytes of a bias's gradient that is kept until all small gradients are added together."""
    return shape.item * shape.decoder.hidden if shape.decoder.biases else 0.0
