"""The work of each kind of layer, whole records beside formulas in the sizes of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.estimate.memory.memory_bounds import KINDS
from plait.estimate.time.decoder_operations import MicrobatchShape, context_method, layer_work
from plait.estimate.time.layer_work import LayerWork, Recomputation
from plait.estimate.time.operation_times import AxisTransfer, Collective, Elementwise, FusedAttention, Product
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

LLAMA = Decoder(
    layers=2, hidden=96, heads=6, vocab=510, context=64, kv_heads=2, inner=160, gated=True, rotary=True
)
GPT = Decoder(layers=2, hidden=96, heads=6, vocab=510, context=64, biases=True, positions=True)
TOKENS = 3 * 64
WHOLE, FP32 = 2 * TOKENS * 96, 4 * TOKENS * 96
"""Bytes of an activation, in bf16 and in fp32."""


def shape_of(decoder: Decoder, *, on_cpu: bool = False, **fields: Any) -> MicrobatchShape:
    return MicrobatchShape(decoder, Plan(**fields), rows=3, on_cpu=on_cpu)


def over_tp(collective: Collective, nbytes: float) -> tuple[AxisTransfer, ...]:
    return (AxisTransfer(collective, "tp", nbytes),)


def both_ways(tokens: float, inputs: float, outputs: float, item: float) -> tuple[Product, ...]:
    """Return the products of a linear: forward, of the input's gradient and of the weight's, added to it."""
    return (
        Product(tokens, outputs, inputs),
        Product(tokens, inputs, outputs),
        Product(outputs, inputs, tokens, result_bytes=2 * item),
    )


def test_the_work_of_a_llama_divided_over_two_ranks_that_gather_again() -> None:
    """Three heads and one of keys on each rank; norms and residuals work on half of the positions."""
    fields = {"precision": "bf16", "master_precision": "fp32", "tp": 2, "sequence_parallel": "regather"}
    found = {kind: layer_work(kind, shape_of(LLAMA, **fields)) for kind in KINDS}
    gather, scatter = over_tp("all-gather", WHOLE), over_tp("reduce-scatter", WHOLE)
    norm, norm_back = Elementwise(2 * WHOLE / 2, 1), Elementwise(4 * WHOLE / 2, 2)
    residual, residual_back = Elementwise(3 * WHOLE / 2, 1), Elementwise(2 * WHOLE / 2, 1)
    assert found["embedding"] == LayerWork(
        forward=(Elementwise(2 * WHOLE, 1),),
        backward=(Elementwise(3 * WHOLE, 2),),
        forward_transfers=scatter,
        backward_gathers=gather,
    )
    inward, inward_back, inward_weights = both_ways(TOKENS, 96, 48 + 2 * 16, 4)
    outward, outward_back, outward_weights = both_ways(TOKENS, 48, 96, 4)
    turn = Elementwise(2 * TOKENS * (48 + 16) * 2, 2)
    core = FusedAttention(3, 3, 1, 16, 64, 64, 0.5)
    start = (norm, inward, turn, core)
    attention = LayerWork(
        forward=(*start, outward, residual),
        backward=(residual_back, outward_back, replace(core, backward=True), turn, inward_back, norm_back),
        weights=(outward_weights, inward_weights),
        selective=Recomputation((norm, turn), gather),
        full=Recomputation(start, gather),
        forward_transfers=gather + scatter,
        backward_gathers=gather,
        backward_transfers=gather + scatter,
    )
    assert found["attention"] == attention
    inward, inward_back, inward_weights = both_ways(TOKENS, 96, 80, 4)
    outward, outward_back, outward_weights = both_ways(TOKENS, 80, 96, 4)
    gate, gate_back = (Elementwise(passes * TOKENS * 80 * 2, 1, activation=True) for passes in (3, 5))
    start = (norm, inward, inward, gate)
    assert found["mlp"] == replace(
        attention,
        forward=(*start, outward, residual),
        backward=(residual_back, outward_back, gate_back, inward_back, inward_back, norm_back),
        weights=(outward_weights, inward_weights, inward_weights),
        selective=Recomputation((norm, gate), gather),
        full=Recomputation(start, gather),
    )
    linear, linear_back, linear_weights = both_ways(TOKENS, 96, 255, 4)
    loss, loss_back = Elementwise(12 * TOKENS * 255, 4), Elementwise(6 * TOKENS * 255, 2)
    assert found["head"] == LayerWork(
        forward=(norm, linear, loss),
        backward=(loss_back, linear_back, norm_back),
        weights=(linear_weights,),
        selective=Recomputation((norm,), gather),
        full=Recomputation((norm,), gather),
        forward_transfers=gather,
        backward_transfers=gather + scatter,
    )


def test_the_work_of_a_gpt_in_fp32_with_logits_of_some_rows() -> None:
    """Of one rank there are no transfers; 192 rows of logits are three chunks of at most 70."""
    shape = shape_of(GPT, loss_rows=70)
    norm, norm_back = Elementwise(2 * FP32, 1), Elementwise(4 * FP32, 2)
    residual, residual_back = Elementwise(3 * FP32, 1), Elementwise(2 * FP32, 1)
    assert layer_work("embedding", shape) == LayerWork(
        forward=(Elementwise(4 * FP32, 3),), backward=(Elementwise(9 * FP32, 6),)
    )
    inward, inward_back, inward_weights = both_ways(TOKENS, 96, 3 * 96, 4)
    outward, outward_back, outward_weights = both_ways(TOKENS, 96, 96, 4)
    core = FusedAttention(3, 6, 6, 16, 64, 64, 0.5)
    assert layer_work("attention", shape) == LayerWork(
        forward=(norm, inward, core, outward, residual),
        backward=(residual_back, outward_back, replace(core, backward=True), inward_back, norm_back),
        weights=(outward_weights, inward_weights),
        selective=Recomputation((norm,)),
        full=Recomputation((norm, inward, core)),
    )
    inward, inward_back, inward_weights = both_ways(TOKENS, 96, 384, 4)
    outward, outward_back, outward_weights = both_ways(TOKENS, 384, 96, 4)
    gelu, gelu_back = (Elementwise(passes * TOKENS * 384 * 4, 1, activation=True) for passes in (2, 3))
    assert layer_work("mlp", shape) == LayerWork(
        forward=(norm, inward, gelu, outward, residual),
        backward=(residual_back, outward_back, gelu_back, inward_back, norm_back),
        weights=(outward_weights, inward_weights),
        selective=Recomputation((norm, gelu)),
        full=Recomputation((norm, inward, gelu)),
    )
    linear, linear_back, linear_weights = both_ways(TOKENS / 3, 96, 510, 4)
    loss, loss_back = Elementwise(16 * TOKENS * 510, 3 * 4), Elementwise(8 * TOKENS * 510, 3 * 2)
    chunks = (*(linear,) * 3, loss, loss_back, *(linear_back,) * 3, *(linear_weights,) * 3)
    again = Recomputation((norm,))
    assert layer_work("head", shape) == LayerWork((norm,), (*chunks, norm_back), (), again, again)


def test_on_a_cpu_norms_rotations_and_gates_are_several_operations() -> None:
    shape = shape_of(LLAMA, on_cpu=True, precision="bf16")
    norm, norm_back = Elementwise(7 * WHOLE, 6), Elementwise(14 * WHOLE, 10)
    turn = Elementwise(4.5 * 2 * TOKENS * (96 + 32) * 2, 14)
    attention, mlp = layer_work("attention", shape), layer_work("mlp", shape)
    assert attention.selective.operations == (norm, turn)
    assert (attention.forward[0], attention.backward[-1]) == (norm, norm_back)
    assert (attention.forward[2], attention.backward[3]) == (turn, turn)
    wide = TOKENS * 160 * 2
    assert mlp.selective.operations == (norm, Elementwise(3 * wide, 2, activation=True))
    assert mlp.backward[2] == Elementwise(5 * wide, 3, activation=True)
    for kind in KINDS:  # a GPT's are one operation each on a CPU, too
        assert layer_work(kind, shape_of(GPT, on_cpu=True)) == layer_work(kind, shape_of(GPT))


def test_contexts_exchange_keys_with_values_in_a_ring_or_heads_by_all_to_alls() -> None:
    """Over four ranks of a context those with one head of keys each send it to all: 4 · 16 features."""
    for fields, again in [({}, 2), ({"tp": 2}, 2), ({"tp": 2, "sequence_parallel": "keep"}, 1)]:
        tp, fields = fields.get("tp", 1), {"precision": "bf16", "cp": 2, **fields}
        keys, size = 32 / tp, TOKENS / 2 * 2
        ring = layer_work("attention", shape_of(LLAMA, context_parallel="ring", **fields))
        assert ring.forward_exchanges == (AxisTransfer("ring", "cp", 2 * size * keys),)
        assert ring.backward_exchanges == (AxisTransfer("ring", "cp", 4 * size * keys),)
        heads = layer_work("attention", shape_of(LLAMA, context_parallel="ulysses", **fields))
        sent = [2 * size * one for one in (2 * max(keys, 32), 96 / tp, 96 / tp)]
        assert [one.nbytes for one in heads.forward_exchanges] == sent
        assert [one.nbytes for one in heads.backward_exchanges] == [*sent[:2], again * sent[2]]
        assert {one.collective for one in heads.forward_exchanges} == {"all-to-all"}
        assert heads.selective.exchanges == heads.forward_exchanges[:2]
        assert heads.full.exchanges == heads.forward_exchanges


def test_causal_attention_computes_half_of_the_pairs_or_what_the_last_rank_sees() -> None:
    for method, layout, seen in [
        ("ring", "contiguous", 1 - 0.5 / 4),  # of the last rank
        ("ring", "zigzag", 0.5),
        ("ulysses", "contiguous", 0.5),
    ]:
        fields = {"cp": 4, "context_parallel": method, "context_layout": layout}
        core = layer_work("attention", shape_of(LLAMA, **fields)).forward[3]
        assert core == FusedAttention(3, 6, 2, 16, 16, 64, seen)


def test_auto_takes_the_method_by_which_a_rank_sends_less() -> None:
    """In a ring each rank sends its keys and values, by heads queries and outputs too: few keys decide."""
    few, four = replace(LLAMA, kv_heads=1), replace(GPT, heads=4)
    for decoder, fields, expected in (
        (few, {"cp": 2}, "ring"),
        (GPT, {"cp": 2}, "ulysses"),
        (GPT, {"cp": 4}, "ring"),  # which do not divide the heads
        (four, {"cp": 2, "tp": 2}, "ulysses"),
        (four, {"cp": 2, "tp": 2, "sequence_parallel": "keep"}, "ring"),  # keys are not sent again
    ):
        assert context_method(shape_of(decoder, **fields)) == expected, (decoder.heads, fields)
