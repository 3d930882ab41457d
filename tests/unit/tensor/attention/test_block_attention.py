"""Blocks of attention, merged, are softmax attention, and so are their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from attention_cases import LAYOUTS, plain_attention, random_inputs, visible
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.live_bytes import LiveBytes
from parity.norm import assert_equal
from parity.pairs import in_turns
from plait.tensor.attention import block_attention, fused_kernels
from plait.tensor.attention.block_attention import (
    WeightDropout,
    block_backward,
    block_forward,
    empty_result,
    merge,
)
from plait.tensor.attention.kernel_calls import BlockCall, block_calls
from plait.tensor.attention.visible_keys import document_bounds, visible_indices, visible_range

SCALE = 0.4
CAP = 0.5
NAMES = "query", "key", "value"
Part = tuple[Tensor, Tensor]


class MaskedCall(NamedTuple):
    """A call with any mask, where a plan's are intervals."""

    rows: slice
    query: slice
    key: slice
    mask: Tensor


def gradients_of(
    inputs: Sequence[Tensor], mask: Tensor, gradient: Tensor, factors: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of plain attention."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = plain_attention(*leaves, mask, SCALE, factors)  # type: ignore[misc]
    gradients = torch.autograd.grad(out, leaves, gradient)
    return out.detach(), dict(zip(NAMES, gradients, strict=True))


def run_calls(
    inputs: Sequence[Tensor],
    gradient: Tensor,
    calls: Sequence[BlockCall | MaskedCall],
    dropout: Sequence[WeightDropout] = (),
) -> tuple[Part, dict[str, Tensor]]:
    """Output and log-sum-exp of all calls merged, and the sums of their gradients."""
    query, key, value = inputs
    out, lse = empty_result(query, value)
    drops = dropout or [None] * len(calls)
    for call, drop in zip(calls, drops, strict=True):
        queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
        part = block_forward(query[queries], key[keys], value[keys], call.mask, SCALE, drop)
        merge(out[queries], lse[queries], *part)
    result = out.to(query.dtype)
    totals = [torch.zeros_like(one) for one in inputs]
    for call, drop in zip(calls, drops, strict=True):
        queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
        given_ones = (one[queries] for one in (gradient, query))
        block = *given_ones, key[keys], value[keys], result[queries], lse[queries]
        parts = block_backward(*block, call.mask, SCALE, drop)
        for total, index, part_of in zip(totals, (queries, keys, keys), parts, strict=True):
            total[index] += part_of
    return (result, lse), dict(zip(NAMES, totals, strict=True))


def cut(mask: Tensor, cuts: Sequence[int]) -> list[MaskedCall]:
    """Calls with masks, for keys cut into blocks."""
    everything = slice(None), slice(0, mask.shape[0])
    return [
        MaskedCall(*everything, slice(start, stop), mask[:, start:stop])
        for start, stop in pairwise([0, *cuts, mask.shape[1]])
    ]


def log_sum_exp(inputs: Sequence[Tensor], mask: Tensor) -> Tensor:
    query, key, _ = inputs
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query @ key.mT * SCALE).masked_fill(~mask, -math.inf).logsumexp(-1)


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([8, 8, 5]),
    n=st.integers(1, 40),
    m=st.integers(1, 40),
    density=st.sampled_from([0.05, 0.5, 1.0]),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_attention_over_blocks_of_keys_merges_to_attention_at_once(
    kv_heads: int, width: int, n: int, m: int, density: float, blocks: int, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = random_inputs(kv_heads=kv_heads, n=n, m=m, width=width)
    gradient = torch.randn(2, 4, n, width, dtype=torch.float64)
    mask = torch.rand(n, m) < density
    expected = gradients_of(inputs, mask, gradient)
    cuts = sorted(torch.randint(0, m + 1, (blocks - 1,)).tolist())  # blocks may be empty
    (out, lse), gradients = run_calls(inputs, gradient, cut(mask, cuts))
    assert_equal({"out": out, **gradients}, {"out": expected[0], **expected[1]}, 1e-12, "attention")
    assert torch.allclose(lse, log_sum_exp(inputs, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("window", "packed"), in_turns({"none": None, "70": 70}, {"packed": True, "whole": False})
)
def test_the_block_calls_of_a_rank_make_up_its_attention(
    layout: str, window: int | None, packed: bool
) -> None:
    """A rank's queries to the keys of all ranks, block by block, as the communication will run them."""
    torch.manual_seed(5)
    length, ranks = 300, 3
    ids = torch.tensor([[0] * 120 + [1] * 100 + [2] * 80, [0] * 300]) if packed else None
    bounds = None if ids is None else document_bounds(ids)
    query, key, value = random_inputs(kv_heads=2, n=length, m=length)
    for rank in range(ranks):
        own = LAYOUTS[layout](length, ranks, rank)
        lo, hi = visible_range(own.numpy(), length, causal=True, window=window, documents=bounds)
        inputs = query[:, :, own], key, value
        gradient = torch.randn(2, 4, len(own), 8, dtype=torch.float64)
        out, lse = empty_result(inputs[0], value)
        others = [LAYOUTS[layout](length, ranks, other) for other in range(ranks)]
        blocks = [(keys, block_calls(*visible_indices(lo, hi, keys.numpy()))) for keys in others]
        for keys, calls in blocks:
            for call in calls:
                index = call.rows, slice(None), call.query
                pair = (one[:, :, keys][call.rows, :, call.key] for one in (key, value))
                merge(out[index], lse[index], *block_forward(inputs[0][index], *pair, call.mask, SCALE))
        totals = [torch.zeros_like(one) for one in inputs]
        for keys, calls in blocks:
            for call in calls:
                index = call.rows, slice(None), call.query
                pair = (one[:, :, keys][call.rows, :, call.key] for one in (key, value))
                ends = out[index], lse[index]
                parts = block_backward(gradient[index], inputs[0][index], *pair, *ends, call.mask, SCALE)
                totals[0][index] += parts[0]
                for total, part in zip(totals[1:], parts[1:], strict=True):
                    block = torch.zeros_like(total[:, :, keys])
                    block[call.rows, :, call.key] = part
                    total[:, :, keys] += block
        mask = visible(own, torch.arange(length), causal=True, window=window, ids=ids).unsqueeze(1)
        expected = gradients_of(inputs, mask, gradient)
        actual = {"out": out, **dict(zip(NAMES, totals, strict=True))}
        assert_equal(actual, {"out": expected[0], **expected[1]}, 1e-12, f"rank {rank}")


@pytest.mark.parametrize(("n", "m"), [(20, 20), (20, 13), (13, 20), (1, 5), (5, 1)])
def test_full_and_causal_calls_without_a_mask_equal_the_formula(n: int, m: int) -> None:
    for mask, fused in product(("full", "causal"), (True, False)):
        call_without_a_mask(n, m, mask, fused)


def call_without_a_mask(n: int, m: int, mask: str, fused: bool) -> None:
    torch.manual_seed(n)
    inputs = random_inputs(kv_heads=2, n=n, m=m)
    gradient = torch.randn(2, 4, n, 8, dtype=torch.float64)
    pairs = torch.ones(n, m, dtype=torch.bool)
    pairs = pairs.tril() if mask == "causal" else pairs
    expected = gradients_of(inputs, pairs, gradient)
    (call,) = [BlockCall(slice(None), slice(0, n), slice(0, m), mask)]  # type: ignore[arg-type]
    with patch.object(
        block_attention, "fused_kernel", fused_kernels.fused_kernel if fused else lambda *_: None
    ):
        (out, lse), gradients = run_calls(inputs, gradient, [call])
    assert_equal({"out": out, **gradients}, {"out": expected[0], **expected[1]}, 1e-12, mask)
    assert torch.allclose(lse, log_sum_exp(inputs, pairs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_dropout_of_attention_weights_equals_the_formula(p: float, kv_heads: int) -> None:
    torch.manual_seed(3)
    inputs = random_inputs(kv_heads=kv_heads)
    gradient = torch.randn(2, 4, 37, 8, dtype=torch.float64)
    mask = (torch.rand(37, 53) < 0.5).index_fill(0, torch.tensor([4]), False)
    keep = torch.rand(2, 4, 37, 53) >= p
    factors = keep.double() / (1 - p) if p < 1 else keep.double()
    expected = gradients_of(inputs, mask, gradient, factors)
    calls = cut(mask, [10, 30])
    drops = [
        WeightDropout(p, lambda start=start, stop=stop: keep[..., start:stop])  # type: ignore[misc]
        for start, stop in pairwise([0, 10, 30, 53])
    ]
    (out, lse), gradients = run_calls(inputs, gradient, calls, drops)
    assert_equal({"out": out, **gradients}, {"out": expected[0], **expected[1]}, 1e-12, f"p = {p}")
    assert torch.allclose(lse, log_sum_exp(inputs, mask), rtol=1e-12, atol=1e-12), "without dropout"


@pytest.mark.parametrize("dropped", [False, True])
def test_attention_with_softcapped_scores_equals_autograd(dropped: bool) -> None:
    """Against autograd, in three blocks of keys; some scores are far above the cap."""
    torch.manual_seed(3)
    inputs = random_inputs(kv_heads=2)
    mask, keep = torch.rand(37, 53) < 0.5, torch.rand(2, 4, 37, 53) < 0.7
    gradient = torch.randn(2, 4, 37, 8, dtype=torch.float64)
    leaves = [one.clone().requires_grad_() for one in inputs]
    query, key, value = (one.repeat_interleave(4 // one.shape[1], 1) for one in leaves)
    scores = (CAP * (query @ key.mT * SCALE / CAP).tanh()).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).nan_to_num() * (keep.double() / 0.7 if dropped else 1.0)
    expected = weights @ value
    of_leaves = torch.autograd.grad(expected, leaves, gradient)
    out, lse = empty_result(inputs[0], inputs[2])
    ranges = [slice(0, 20), slice(20, 21), slice(21, 53)]

    def options(keys: slice) -> tuple[WeightDropout | None, float]:
        part = keep[..., keys]
        return WeightDropout(0.3, lambda: part) if dropped else None, CAP

    for keys in ranges:
        pair = (one[:, :, keys] for one in inputs[1:])
        merge(out, lse, *block_forward(inputs[0], *pair, mask[:, keys], SCALE, *options(keys)))
    totals = [torch.zeros_like(one) for one in inputs]
    for keys in ranges:
        block = gradient, inputs[0], *(one[:, :, keys] for one in inputs[1:]), out, lse, mask[:, keys]
        parts = block_backward(*block, SCALE, *options(keys))
        totals[0] += parts[0]
        for total, part in zip(totals[1:], parts[1:], strict=True):
            total[:, :, keys] += part
    named = dict(zip(NAMES, of_leaves, strict=True))
    assert_equal(
        {"out": out, **dict(zip(NAMES, totals, strict=True))},
        {"out": expected.detach(), **named},
        1e-12,
        "cap",
    )


def test_dropout_within_a_causal_call_equals_the_formula() -> None:
    torch.manual_seed(3)
    inputs = random_inputs(n=20, m=20)
    gradient = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    keep = torch.rand(2, 4, 20, 20) < 0.7
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    expected = gradients_of(inputs, causal, gradient, keep.double() / 0.7)
    call = BlockCall(slice(None), slice(0, 20), slice(0, 20), "causal")
    (out, _), gradients = run_calls(inputs, gradient, [call], [WeightDropout(0.3, lambda: keep)])
    assert_equal({"out": out, **gradients}, {"out": expected[0], **expected[1]}, 1e-12, "dropout")


@pytest.mark.parametrize("fused", [True, False])
def test_attention_in_two_blocks_passes_gradcheck(fused: bool) -> None:
    """Of two blocks, as an autograd function has them."""
    torch.manual_seed(1)
    mask = torch.rand(4, 6) < 0.6
    mask[2, :3] = False

    class Blocks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):  # type: ignore[no-untyped-def]
            (out, _), _ = run_calls((query, key, value), torch.zeros_like(query), cut(mask, [3]))
            ctx.save_for_backward(query, key, value)
            return out

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            _, gradients = run_calls(ctx.saved_tensors, gradient, cut(mask, [3]))
            return tuple(gradients.values())

    inputs = [
        one.requires_grad_() for one in random_inputs(rows=1, heads=2, kv_heads=1, n=4, m=6, size=3, width=3)
    ]
    with patch.object(
        block_attention, "fused_kernel", fused_kernels.fused_kernel if fused else lambda *_: None
    ):
        assert torch.autograd.gradcheck(Blocks.apply, inputs)


BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of outputs and gradients, relative to the largest: a few roundings."""


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("fused", [True, False])
def test_attention_in_lower_precisions_is_close_to_float64(dtype: torch.dtype, fused: bool) -> None:
    torch.manual_seed(2)
    inputs = [one.to(dtype) for one in random_inputs(kv_heads=2, n=64, m=96, size=16, width=16)]
    gradient = torch.randn(2, 4, 64, 16).to(dtype)
    mask = torch.rand(64, 96) < 0.5
    expected = gradients_of([one.double() for one in inputs], mask, gradient.double())
    with patch.object(
        block_attention, "fused_kernel", fused_kernels.fused_kernel if fused else lambda *_: None
    ):
        part = block_forward(*inputs, mask, SCALE)  # type: ignore[arg-type]
        (out, lse), gradients = run_calls(inputs, gradient, cut(mask, [20, 40]))
    assert part[0].dtype == out.dtype == dtype
    assert part[1].dtype == lse.dtype == torch.float32
    assert {one.dtype for one in gradients.values()} == {dtype}
    for actual, wanted in ((out, expected[0]), *((gradients[name], expected[1][name]) for name in NAMES)):
        assert (actual.double() - wanted).abs().max() <= BOUNDS[dtype] * wanted.abs().max()
    assert (lse.double() - log_sum_exp([one.double() for one in inputs], mask)).abs().max() < (
        1e-2 if dtype == torch.bfloat16 and fused else 2e-3 if fused else 2e-6
    )


@pytest.mark.parametrize("fused", [True, False])
def test_queries_that_see_no_key_give_zero_and_no_gradient(fused: bool) -> None:
    mask = torch.ones(37, 53, dtype=torch.bool)
    mask[4] = False
    with patch.object(
        block_attention, "fused_kernel", fused_kernels.fused_kernel if fused else lambda *_: None
    ):
        out, lse = block_forward(*random_inputs(), mask, SCALE)
    assert not out[:, :, 4].any()
    assert lse[:, :, 4].isneginf().all()
    assert lse.isfinite().sum() == 2 * 4 * 36


def test_accumulators_are_at_least_float32() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        query, value = torch.ones(1, 2, 3, 4, dtype=dtype), torch.ones(1, 1, 5, 6, dtype=dtype)
        out, lse = empty_result(query, value)
        assert out.shape == (1, 2, 3, 6)
        assert lse.shape == (1, 2, 3)
        assert out.dtype == lse.dtype == wide
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_merging_a_block_without_visible_keys_changes_nothing() -> None:
    out, lse = torch.randn(1, 1, 3, 2), torch.tensor([[[1.0, -math.inf, 300.0]]])
    out[:, :, 1] = 0.0
    before = out.clone(), lse.clone()
    merge(out, lse, torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -math.inf))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    # The first part is taken as it is, also where exp(lse) is not a float.
    out, lse = empty_result(out, out)
    merge(out, lse, *before)
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


def test_merging_does_not_hide_what_is_not_finite() -> None:
    out, lse = empty_result(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    merge(out, lse, torch.full((1, 1, 1, 2), math.nan), torch.full((1, 1, 1), math.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(
    "sizes", [{"n": 0}, {"m": 0}, {"n": 0, "m": 0}, {"rows": 0}, {"heads": 0, "kv_heads": 0}]
)
def test_blocks_without_queries_or_keys_give_empty_or_zero_results(sizes: dict[str, int]) -> None:
    for mask, dropped, device in product(("full", "causal", "tensor"), (False, True), ("cpu", "meta")):
        empty_block(sizes, mask, dropped, device)


def empty_block(sizes: dict[str, int], mask: str, dropped: bool, device: str) -> None:
    query, key, value = (one.to(device) for one in random_inputs(**sizes))  # type: ignore[arg-type]
    n, m = query.shape[2], key.shape[2]
    pairs = torch.ones(n, m, dtype=torch.bool) if mask == "tensor" else mask
    shape = (*query.shape[:3], m)
    dropout = (
        WeightDropout(0.5, lambda: torch.ones(shape, dtype=torch.bool, device=device)) if dropped else None
    )
    out, lse = block_forward(query, key, value, pairs, SCALE, dropout)  # type: ignore[arg-type]
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]
    block = torch.ones_like(out), query, key, value, out, lse
    gradients = block_backward(*block, pairs, SCALE, dropout)  # type: ignore[arg-type]
    assert [one.shape for one in gradients] == [query.shape, key.shape, value.shape]
    if device == "cpu":
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))
        assert not any(one.any() for one in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_blocks_on_meta_give_the_shapes_and_strides_of_the_cpu(dtype: torch.dtype) -> None:
    for mask, dropped, width in product(("full", "causal", "tensor"), (False, True), (8, 5)):
        meta_block(mask, dropped, width, dtype)


def meta_block(mask: str, dropped: bool, width: int, dtype: torch.dtype) -> None:
    def described(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        inputs = [one.to(device, dtype) for one in random_inputs(kv_heads=2, width=width)]
        pairs = torch.ones(37, 53, dtype=torch.bool) if mask == "tensor" else mask
        keep = torch.ones(2, 4, 37, 53, dtype=torch.bool, device=device)
        dropout = WeightDropout(0.5, lambda: keep) if dropped else None
        out, lse = block_forward(*inputs, pairs, SCALE, dropout)  # type: ignore[arg-type]
        block = torch.ones_like(out), *inputs, out, lse
        gradients = block_backward(*block, pairs, SCALE, dropout)  # type: ignore[arg-type]
        return [(one.shape, one.dtype) for one in (out, lse, *gradients)]

    assert described("meta") == described("cpu")


def test_a_fused_block_holds_no_weights() -> None:
    query, key, value = (one.float() for one in random_inputs(n=512, m=512))
    with LiveBytes() as live:
        live.most = 0
        out, lse = block_forward(query, key, value, "causal", SCALE)
        block_backward(torch.ones_like(out), query, key, value, out, lse, "causal", SCALE)
    assert live.most is not None
    assert live.most < 2 * 4 * 512 * 512 * 4 // 4  # of the weights: rows, heads, queries, keys, bytes


def test_attention_kernels_do_not_change_their_inputs() -> None:
    torch.manual_seed(7)
    inputs = random_inputs()
    mask = (torch.rand(37, 53) < 0.5).index_fill(0, torch.tensor([4]), False)
    for dropout in (None, WeightDropout(0.5, lambda: torch.ones(2, 4, 37, 53, dtype=torch.bool))):
        out, lse = block_forward(*inputs, mask, SCALE, dropout)
        given_ones = [torch.randn_like(out), *inputs, out, lse, mask]
        before = [one.clone() for one in given_ones]
        block_backward(*given_ones, SCALE, dropout)  # type: ignore[arg-type]
        block_forward(*inputs, mask, SCALE, dropout)
        assert all(torch.equal(one, other) for one, other in zip(given_ones, before, strict=True))
