"""Fused attention on the meta device, where PyTorch would otherwise run its unfused operations.

A fused kernel saves its inputs, its output and one number per row for the backward, but no matrix of weights.
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
    """Return whether real devices have a fused kernel for this call of `scaled_dot_product_attention`."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    return all(tensor.dim() == 4 for tensor in (query, key, value)) and not (
        len(sizes) > 1 or dropout_p or learns_mask
    )


def fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Return the output `[batch, heads, length, size]`; save the tensors that a fused kernel saves."""
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
    """Return a fused kernel's output, and the log-sum-exp per row that it saves for the backward.

    From the CPU's operation, which has no public name: recomputation may keep its result.
    """
    output, normalisers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return output, normalisers
