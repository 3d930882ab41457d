"""Device operations and collectives of each kind of layer, for one micro-batch on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plait.estimate.time.layer_work import LayerWork, MicrobatchSizes, Recomputation
from plait.estimate.time.operation_times import (
    AxisTransfer,
    Elementwise,
    FusedAttention,
    Product,
)
from plait.plan.context_parallel_heads import sending_less, vectors_sent
from plait.plan.decoder_sizes import Decoder, LayerKind
from plait.plan.plan import Plan


@dataclass(frozen=True)
class MicrobatchShape(MicrobatchSizes):
    """A micro-batch of a decoder: all that the sizes of its layers depend on."""

    decoder: Decoder
    plan: Plan
    rows: float
    on_cpu: bool = False
    """Whether RMS norms, rotations and gated activations are several operations each; such norms keep copies
    in fp32."""

    def work(self, kind: LayerKind) -> LayerWork:
        """Return the operations and collectives of a layer of `kind`, on the largest rank of `tp`."""
        return layer_work(kind, self)

    def parameters(self, kind: LayerKind) -> float:
        """Return the number of parameters of a layer of `kind` on a rank of `tp`."""
        return self.decoder.parameters(kind, self.plan.tp)

    def trained_parameters(self, kinds: Sequence[LayerKind]) -> float:
        """Return the number of parameters of several layers on a rank of `tp`, all of which train."""
        return self.decoder.parameters_of(kinds, self.plan.tp)

    @property
    def message_bytes(self) -> float:
        """Bytes of a message between stages: the activation between two layers."""
        return self.outside

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch that a rank of `cp` holds."""
        return self.rows * self.decoder.context / self.plan.cp

    @property
    def activation(self) -> float:
        """Bytes of a layer's output for a micro-batch on a rank of `cp`, not divided over `tp`."""
        return self.tokens * self.decoder.hidden * self.item

    @property
    def key_features(self) -> float:
        """Features of the keys on a rank of `tp`, as many as of the values; at least one head."""
        heads = max(self.decoder.key_heads, min(self.plan.tp, self.decoder.heads))
        return heads * self.decoder.head_size / self.plan.tp

    @property
    def outside(self) -> float:
        """Bytes of the activation that norms read: whole, or this rank's part of the sequence."""
        return self.activation / (self.plan.tp if self.plan.cuts_sequence else 1)

    @property
    def composes(self) -> bool:
        """Whether norms and rotations run as several operations each, as in a Llama on a CPU."""
        return self.on_cpu and not self.decoder.biases

    @property
    def loss_chunks(self) -> int:
        """The number of chunks of rows in which the head's logits are computed (`Plan.loss_rows`)."""
        return 1 if self.plan.loss_rows is None else math.ceil(self.tokens / self.plan.loss_rows)

    def linear(self, inputs: float, outputs: float, count: int = 1) -> _LinearProducts:
        """Return the matrix products, forward and backward, of `count` linears of equal size."""
        return _LinearProducts(self.tokens, inputs, outputs, count, 2.0 * self.gradient_item)


@dataclass(frozen=True)
class _LinearProducts:
    tokens: float
    inputs: float
    outputs: float
    count: int
    accumulation: float

    @property
    def forward(self) -> tuple[Product, ...]:
        return (Product(self.tokens, self.outputs, self.inputs),) * self.count

    @property
    def backward(self) -> tuple[Product, ...]:
        return (Product(self.tokens, self.inputs, self.outputs),) * self.count

    @property
    def weights(self) -> tuple[Product, ...]:
        each = Product(self.outputs, self.inputs, self.tokens, result_bytes=self.accumulation)
        return (each,) * self.count


def layer_work(kind: LayerKind, shape: MicrobatchShape) -> LayerWork:
    """Return the operations and collectives of a decoder's layer of `kind`, on the largest rank of `tp`."""
    makers = {"embedding": _embedding, "attention": _attention, "mlp": _mlp, "head": _head}
    return makers[kind](shape)


def _embedding(shape: MicrobatchShape) -> LayerWork:
    tables = 3 if shape.decoder.positions else 1
    return LayerWork(
        forward=(Elementwise((tables + 1) * shape.activation, tables),),
        backward=(Elementwise(3 * tables * shape.activation, 2 * tables),),
        forward_transfers=_region_end(shape),
        backward_gathers=_region_start(shape),
    )


def _attention(shape: MicrobatchShape) -> LayerWork:
    decoder, tp = shape.decoder, shape.plan.tp
    keys = shape.key_features
    own = decoder.hidden / tp
    # The three projections are counted as one product, as frameworks either join or batch them.
    inward = shape.linear(decoder.hidden, own + 2 * keys)
    outward = shape.linear(own, decoder.hidden)
    core = _core(shape, own, keys)
    turned = 2 * shape.tokens * (own + keys) * shape.item if decoder.rotary else 0.0
    # Composed: for queries and keys four products, a sum and a difference of halves, and a concatenation.
    turn = (Elementwise(*((4.5 * turned, 14) if shape.composes else (turned, 2))),) if turned else ()
    before, after = _norm_and_residual(shape)
    exchanges, exchanges_backward = _exchanges(shape, own, keys)
    start = (*before.forward, *inward.forward, *turn, core)
    # Heads are divided again, a ring's result is kept.
    to_heads = tuple(one for one in exchanges[:-1] if one.collective == "all-to-all")
    return LayerWork(
        forward=(*start, *outward.forward, *after.forward),
        backward=(
            *after.backward,
            *outward.backward,
            replace(core, backward=True),
            *turn,
            *inward.backward,
            *before.backward,
        ),
        weights=(*outward.weights, *inward.weights),
        selective=Recomputation((*before.forward, *turn), _region_start(shape), to_heads),
        full=Recomputation(start, _region_start(shape), exchanges),
        forward_transfers=_region_start(shape) + _region_end(shape),
        backward_gathers=_region_start(shape),
        backward_transfers=_gradient_transfers(shape),
        forward_exchanges=exchanges,
        backward_exchanges=exchanges_backward,
    )


def _exchanges(
    shape: MicrobatchShape, own: float, keys: float
) -> tuple[tuple[AxisTransfer, ...], tuple[AxisTransfer, ...]]:
    """Return the `cp` transfers of an attention layer, of its forward and of its backward.

    `own` and `keys`: query and key features on this rank.

    "ring": keys and values go round, in the backward with their gradients. "ulysses": keys with values,
    queries, and outputs change from positions to heads or back, as their gradients do, one after another;
    outputs that are not kept once more, with their gradients.
    """
    plan, size = shape.plan, shape.tokens * shape.item
    if plan.cp == 1:
        return (), ()
    if context_method(shape) == "ring":
        ring = AxisTransfer("ring", "cp", 2 * size * keys)
        return (ring,), (replace(ring, nbytes=2 * ring.nbytes),)
    *inward, outward = (
        AxisTransfer("all-to-all", "cp", plan.cp * size * features)
        for features in (2 * keys_read(shape), own, own)
    )
    again = 1 if plan.sequence_parallel == "keep" else 2
    return (*inward, outward), (*inward, replace(outward, nbytes=again * outward.nbytes))


def context_method(shape: MicrobatchShape) -> str:
    """Return how attention reads the positions of other ranks of `cp`: "ring" or "ulysses"."""
    decoder, plan = shape.decoder, shape.plan
    if plan.context_parallel != "auto":
        return plan.context_parallel
    queries, keys = decoder.heads / plan.tp, shape.key_features / decoder.head_size
    kept = plan.sequence_parallel == "keep"
    return sending_less(*vectors_sent(round(queries), round(keys), plan.cp, keeps_keys=kept))


def keys_read(shape: MicrobatchShape) -> float:
    """Return the features of keys that attention reads on a rank: more if heads are shared under Ulysses."""
    if shape.plan.cp == 1 or context_method(shape) == "ring":
        return shape.key_features
    # Ranks that share a head of keys each get it.
    return max(shape.key_features, shape.plan.cp * shape.decoder.head_size)


def _core(shape: MicrobatchShape, own: float, keys: float) -> FusedAttention:
    """Return the forward of attention without linears; `own`: query features."""
    width, length = shape.decoder.head_size, shape.decoder.context
    queries = length / shape.plan.cp
    return FusedAttention(shape.rows, own / width, keys / width, width, queries, length, _seen(shape))


def _seen(shape: MicrobatchShape) -> float:
    """Return the fraction of the pairs of query and key that the slowest rank of `cp` computes.

    Half in causal attention, but more on the last rank of a ring that has contiguous positions.
    """
    plan = shape.plan
    if plan.cp == 1 or plan.context_layout != "contiguous" or context_method(shape) != "ring":
        return 0.5
    return 1 - 0.5 / plan.cp


def _mlp(shape: MicrobatchShape) -> LayerWork:
    decoder, tp = shape.decoder, shape.plan.tp
    inner = decoder.inside / tp
    inward = shape.linear(decoder.hidden, inner, 2 if decoder.gated else 1)
    outward = shape.linear(inner, decoder.hidden)
    wide = shape.tokens * inner * shape.item
    several = shape.composes and decoder.gated
    passes, passes_backward = (3, 5) if decoder.gated else (2, 3)
    activation = Elementwise(passes * wide, 2 if several else 1, activation=True)
    activation_backward = Elementwise(passes_backward * wide, 3 if several else 1, activation=True)
    before, after = _norm_and_residual(shape)
    start = (*before.forward, *inward.forward, activation)
    return LayerWork(
        forward=(*start, *outward.forward, *after.forward),
        backward=(
            *after.backward,
            *outward.backward,
            activation_backward,
            *inward.backward,
            *before.backward,
        ),
        weights=(*outward.weights, *inward.weights),
        selective=Recomputation((*before.forward, activation), _region_start(shape)),
        full=Recomputation(start, _region_start(shape)),
        forward_transfers=_region_start(shape) + _region_end(shape),
        backward_gathers=_region_start(shape),
        backward_transfers=_gradient_transfers(shape),
    )


def _head(shape: MicrobatchShape) -> LayerWork:
    decoder, tp, chunks = shape.decoder, shape.plan.tp, shape.loss_chunks
    before, _ = _norm_and_residual(shape)
    linear = replace(shape.linear(decoder.hidden, decoder.vocab / tp, chunks), tokens=shape.tokens / chunks)
    logits = shape.tokens * decoder.vocab / tp
    loss = Elementwise(2 * logits * (shape.item + 4), 4 * chunks)
    loss_backward = Elementwise(logits * (shape.item + 4), 2 * chunks)
    again = Recomputation(before.forward, _region_start(shape))
    work = LayerWork(
        forward=(*before.forward, *linear.forward, loss),
        backward=(loss_backward, *linear.backward, *before.backward),
        weights=linear.weights,
        selective=again,
        full=again,
        forward_transfers=_region_start(shape),
        backward_transfers=_gradient_transfers(shape),
    )
    if shape.plan.loss_rows is None:
        return work
    backward = (*linear.forward, loss, loss_backward, *linear.backward, *linear.weights, *before.backward)
    return replace(work, forward=before.forward, backward=backward, weights=())


def _norm_and_residual(shape: MicrobatchShape) -> tuple[LayerWork, LayerWork]:
    """Return the work of the norm before a region, and of the residual connection after it."""
    part = shape.outside
    # Composed: square, mean, sum with epsilon, inverse root and two products; about ten in the backward.
    passes, backward = ((7, 6), (14, 10)) if shape.composes else ((2, 1), (4, 2))
    norm = LayerWork(
        (Elementwise(passes[0] * part, passes[1]),),
        (Elementwise(backward[0] * part, backward[1]),),
    )
    residual = LayerWork((Elementwise(3 * part, 1),), (Elementwise(2 * part, 1),))
    return norm, residual


def _region_start(shape: MicrobatchShape) -> tuple[AxisTransfer, ...]:
    if shape.plan.tp == 1 or not shape.plan.cuts_sequence:
        return ()
    return (AxisTransfer("all-gather", "tp", shape.activation),)


def _region_end(shape: MicrobatchShape) -> tuple[AxisTransfer, ...]:
    if shape.plan.tp == 1:
        return ()
    kind = AxisTransfer(
        "reduce-scatter" if shape.plan.cuts_sequence else "all-reduce", "tp", shape.activation
    )
    return (kind,)


def _gradient_transfers(shape: MicrobatchShape) -> tuple[AxisTransfer, ...]:
    """Return the sum of the gradient of a region's input, and the input's gather, where it is not kept."""
    again = _region_start(shape) if shape.plan.sequence_parallel == "regather" else ()
    return again + _region_end(shape)
