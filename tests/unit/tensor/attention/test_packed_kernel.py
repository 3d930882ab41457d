"""One call for all packed documents: what plait gives to flash attention, and takes from it.

The operation is CUDA's; a stand-in of it computes on the CPU, after torch's documentation of `varlen_attn`.
`tests/gpu/test_attention_kernels.py` runs the operation itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_cases import plain_attention, random_inputs, visible
from torch import Tensor

from parity.norm import assert_equal
from plait.tensor.attention import attention
from plait.tensor.attention.fused_kernels import Attended, PackedCall
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.running_sequence import ContextParallelism, running

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 3], [4, 4, 4, 4, 4, 4, 5, 5, 5, 5]])


def per_document(
    tensors: tuple[Tensor, ...], begins: Tensor, causal: bool, left: int | None, right: int | None
) -> Iterator[tuple[slice, Tensor]]:
    """Each document's slice of the rows one after another, and its mask."""
    for start, stop in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = distance <= (stop if left is None else left)
        seen &= -distance <= (stop if right is None else right)
        yield slice(start, stop), seen & (distance >= 0) if causal else seen


def forward(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, *more: Any, **options: Any) -> Any:
    """As `aten._flash_attention_forward`: `[total, heads, size]`, and the log-sum-exp `[heads, total]`."""
    same, longest, other, dropout, causal, debug = more
    assert same is begins
    assert (begins.dtype, longest, dropout, debug) == (torch.int32, other, 0.0, False)
    assert longest == int(begins.diff().max())
    sides = options["window_size_left"], options["window_size_right"]
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1])
    for part, seen in per_document((query, key, value), begins, causal, *sides):
        given = (one[None, part].transpose(1, 2) for one in (query, key, value))
        out[part] = plain_attention(*given, seen, options["scale"])[0].transpose(0, 1)
        keys = key[part].repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query[part], keys) * options["scale"]
        lse[:, part] = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return out, lse, *[torch.empty(0)] * 3


def backward(gradient: Tensor, *given: Any, **options: Any) -> Any:
    """As `aten._flash_attention_backward`."""
    query, key, value, out, lse, begins, same, *more = given
    longest, other, dropout, causal, *_ = more
    leaves = [one.detach().clone().requires_grad_() for one in (query, key, value)]
    with torch.enable_grad():
        expected, its_lse, *_ = forward(
            *leaves, begins, same, longest, other, dropout, causal, False, **options
        )
    assert torch.allclose(out, expected)
    assert torch.allclose(lse, its_lse)
    assert lse.is_contiguous()
    return torch.autograd.grad(expected, leaves, gradient)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """The calls of the stand-in, which takes CPU tensors."""
    found: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *given, **options: found.append(function.__name__) or function(*given, **options)

    with (
        patch.object(torch.ops.aten, "_flash_attention_forward", counted(forward)),
        patch.object(torch.ops.aten, "_flash_attention_backward", counted(backward)),
        patch.object(PackedCall, "computes", lambda *_: True),
    ):
        yield found


def attended(ids: Tensor, causal: bool, window: int | None, kv_heads: int, **more: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    inputs = [one.requires_grad_() for one in random_inputs(kv_heads=kv_heads, n=10, m=10)]
    with running(ContextParallelism.of_one_rank().sequence(10, document_bounds(ids))):
        out = attention(*inputs, causal, window, **more)
    gradients = torch.autograd.grad(out, inputs, torch.randn(2, 4, 10, 8, dtype=torch.float64))
    return dict(zip(("out", "query", "key", "value"), (out.detach(), *gradients), strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 99])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_packed_kernel_call_computes_all_documents(
    calls: list[str], causal: bool, window: int | None, kv_heads: int
) -> None:
    found = attended(IDS, causal, window, kv_heads)
    assert calls == ["forward", "backward"]
    with patch.object(PackedCall, "computes", lambda *_: False):
        assert_equal(found, attended(IDS, causal, window, kv_heads), 1e-12, "packed")
    mask = visible(torch.arange(10), torch.arange(10), causal=causal, window=window, ids=IDS)
    torch.manual_seed(0)
    plain = plain_attention(*random_inputs(kv_heads=kv_heads, n=10, m=10), mask[:, None], 8**-0.5)
    assert_equal({"out": found["out"]}, {"out": plain}, 1e-12, "plain attention")


def test_the_packed_kernel_is_not_called_for_softcap_dropout_or_single_documents(calls: list[str]) -> None:
    """For capped scores, dropped weights, and rows of one document, which PyTorch's own function takes."""
    attended(IDS, True, None, 4, softcap=5.0)
    attended(IDS, True, None, 4, dropout=torch.nn.Dropout(0.5))
    attended(torch.zeros_like(IDS), True, None, 4)
    assert calls == []


def test_a_cpu_has_no_packed_kernel() -> None:
    call = PackedCall.of(document_bounds(IDS), True, None)
    assert not call.computes(*random_inputs())
    assert call.begins.tolist() == [0, 3, 8, 9, 10, 16, 20]
    assert call.longest == 6


@pytest.mark.parametrize("window", [None, 3])
def test_the_packed_kernel_on_meta_gives_the_shapes_and_dtypes_plait_relies_on(window: int | None) -> None:
    """Its schema, and the shapes that plait relies on; heads that lie within positions are not copied."""
    call = PackedCall.of(document_bounds(IDS), True, window).on(torch.device("meta"))
    query = torch.empty(2, 10, 4, 8, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    key = torch.empty(2, 10, 2, 8, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    out, lse = call.forward(query, key, key, 0.3)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)
    gradients = call.backward(out, Attended(query, key, key, out, lse), 0.3)
    assert [one.shape for one in gradients] == [query.shape, key.shape, key.shape]
