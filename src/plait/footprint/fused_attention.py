"""Attention as devices compute it, for the meta device, where PyTorch takes its parts one by one.

A fused kernel keeps its inputs, its output and one number a row for the backward, never the matrix of
weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fuses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether devices have a fused kernel for this call of `scaled_dot_product_attention`."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    return all(tensor.dim() == 4 for tensor in (query, key, value)) and not (
        len(sizes) > 1 or dropout_p or learns_mask
    )


def fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """What a fused kernel gives for `[batch, heads, length, size]`, and keeps."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    mixed: Tensor = _Fused.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return mixed


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output, normalisers = _kernel(query, key, value)
        ctx.save_for_backward(query, key, value, mask, output, normalisers)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Like the output of a fused kernel, in memory too, and like the numbers that it keeps of each row.

    An operation without a public name: the one that a CPU runs, whose result recomputation may keep.
    """
    output, normalisers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return output, normalisers
