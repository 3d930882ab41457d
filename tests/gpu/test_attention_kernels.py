"""Each kernel of a GPU gives the attention of a block, and its gradients, and does not make the host wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from gpu.host_waits import forbid_host_waits
from plait.ranks.accelerator import default_device
from plait.tensor.attention import attention
from plait.tensor.attention.block_attention import (
    Scaling,
    block_backward,
    block_forward,
    empty_result,
    merge,
    unfused_backward,
    unfused_forward,
)
from plait.tensor.attention.fused_kernels import Attended
from plait.tensor.attention.key_exchange_plan import Mask, exchange_plan
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.running_sequence import ContextParallelism, running

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest element."""
SCALE, QUERIES = 0.2, 72
BLOCKS = {
    "full": 96,
    "causal": QUERIES,
    "causal, fewer keys": 40,
    "mask": 90,
    "mask, one key": 1,
}
"""Kinds of masks and numbers of keys."""


def errors(
    dtype: torch.dtype, size: int, width: int, kv_heads: int, device: torch.device
) -> dict[str, float]:
    """Of each kind of block, how far two blocks' output and gradients are off, relative to the largest."""
    torch.manual_seed(1)
    found = {}
    for kind, m in BLOCKS.items():
        query = torch.randn(2, 4, QUERIES, size).to(dtype)
        key, value = (torch.randn(2, kv_heads, m, one).to(dtype) for one in (size, width))
        gradient = torch.randn(2, 4, QUERIES, width).to(dtype)
        pairs = torch.rand(QUERIES, m) < 0.6
        pairs[5] = False
        if not kind.startswith("mask"):
            pairs = torch.ones_like(pairs).tril() if kind.startswith("causal") else torch.ones_like(pairs)
        mask = pairs if kind.startswith("mask") else kind.partition(",")[0]
        expected = _expected(query, key, value, gradient, pairs)
        here = [one.to(device) for one in (query, key, value, gradient)]
        other = [torch.randn(2, kv_heads, 24, one).to(device, dtype) for one in (size, width)]
        block_forward(*here[:3], mask, SCALE)  # type: ignore[arg-type]
        with forbid_host_waits(device):
            out, lse = empty_result(here[0], here[2])
            merge(out, lse, *block_forward(*here[:3], mask, SCALE))  # type: ignore[arg-type]
            result = out.to(dtype, copy=True)
            parts = block_backward(here[3], *here[:3], result, lse, mask, SCALE)  # type: ignore[arg-type]
            merge(out, lse, *block_forward(here[0], *other, "full", SCALE))
        actual = result, *parts
        largest = max(float(one.abs().max()) for one in expected)  # with one key, that of the query is 0
        found[kind] = max(
            float((one.cpu().double() - wanted).abs().max()) / largest
            for one, wanted in zip(actual, expected, strict=True)
        )
        assert out.isfinite().all()
        assert lse.isfinite().all()
    return found


def _expected(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, pairs: Tensor
) -> tuple[Tensor, ...]:
    inputs = [one.double() for one in (query, key, value)]
    out, lse = unfused_forward(*inputs, pairs, Scaling(SCALE), None)
    lse = lse.masked_fill(lse.isinf(), 0.0)
    return out, *unfused_backward(gradient.double(), Attended(*inputs, out, lse), pairs, Scaling(SCALE), None)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("size", "width"), [(64, 64), (20, 20), (96, 64)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_in_blocks_on_a_gpu_equals_attention_at_once(
    gpu_ranks: GpuRanks, dtype: torch.dtype, size: int, width: int, kv_heads: int
) -> None:
    """Also with values narrower than keys, as latent attention has them."""
    (found,) = gpu_ranks.run(_errors_of_rank, dtype, size, width, kv_heads, gpu_ranks.device, ranks=1)
    assert max(found.values()) < BOUNDS[dtype], found


def _errors_of_rank(dtype: torch.dtype, size: int, width: int, kv_heads: int, kind: str) -> dict[str, float]:
    device = torch.device("cpu") if kind == "cpu" else default_device()
    return errors(dtype, size, width, kv_heads, device)


IDS = torch.tensor([[0] * 5 + [1] * 40 + [2] * 27, [3] * 71 + [4]])


def packed_results(
    device: torch.device, dtype: torch.dtype, kv_heads: int, window: int | None
) -> list[Tensor]:
    """Output and gradients of attention with sinks in packed documents, without a wait of the host."""
    torch.manual_seed(2)
    shapes = [(2, QUERIES, heads, 64) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, gradient = [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    leaves = [one.transpose(1, 2).requires_grad_() for one in inputs]
    sinks = torch.randn(4, dtype=torch.float64).to(device, dtype).requires_grad_()
    sequence = ContextParallelism.of_one_rank().sequence(QUERIES, document_bounds(IDS))
    found: list[Tensor] = []
    for waits in (nullcontext(), forbid_host_waits(device)):  # the first one loads kernels
        with waits, running(sequence):
            out = attention(*leaves, window=window, sinks=sinks)
            found = [out.detach(), *torch.autograd.grad(out, [*leaves, sinks], gradient.transpose(1, 2))]
    if device.type == "cuda":
        packed = exchange_plan(sequence, Mask(True, window), device).packed
        assert packed is not None
        assert packed.computes(*leaves) == (dtype in (torch.bfloat16, torch.float16))
    return [one.cpu().double() for one in found]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_on_packed_documents_on_a_gpu_equals_masked_attention(
    gpu_ranks: GpuRanks, dtype: torch.dtype, kv_heads: int, window: int | None
) -> None:
    """One call of flash attention in 16 bits, else a call for each document."""
    found, wanted = gpu_ranks.run(_packed_on_both, dtype, kv_heads, window, gpu_ranks.device, ranks=1)[0]
    for one, expected in zip(found, wanted, strict=True):
        assert float((one - expected).abs().max()) < BOUNDS[dtype] * float(expected.abs().max())


def _packed_on_both(dtype: torch.dtype, kv_heads: int, window: int | None, kind: str) -> Any:
    cpu = torch.device("cpu")
    device = cpu if kind == "cpu" else default_device()
    wanted = packed_results(cpu, torch.float64, kv_heads, window)
    return packed_results(device, dtype, kv_heads, window), wanted
