"""Attention and RMS norm for the meta device, which save for the backward what fused kernels save.

Attention has such a kernel on every device, an RMS norm on GPUs (`aten::_fused_rms_norm`): it saves its input
and a number for each row. On CPUs, and on meta, torch composes the norm of several operations, which keep
another tensor of the input's shape, and of one in 16 bits two in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.tensor.attention.fused_kernels import CPU, Attended, cpu_attention, repeated_heads
from plait.tensor.autograd.private_torch_functions import hidden_from_function_modes


def fused_operation(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, on_cpu: bool
) -> Callable[..., Tensor] | None:
    """Return a replacement of `func` that saves what a fused kernel saves, or None where there is none.

    `on_cpu`: whether layers would run on a CPU, in place of a GPU.
    """
    if func is functional.scaled_dot_product_attention:
        if not _has_attention_kernel(*args, **kwargs, on_cpu=on_cpu):
            return None
        return _attention if on_cpu else _attention_of_gpu
    if not on_cpu and (func is functional.rms_norm or func is torch.rms_norm):
        return _rms_norm if _has_rms_norm_kernel(*args, **kwargs) else None
    return None


def _has_attention_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    on_cpu: bool,
    **__: Any,
) -> bool:
    """Return whether PyTorch has a fused kernel for `scaled_dot_product_attention` with these arguments."""
    if query.dtype == torch.float64 and not on_cpu:
        return False
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    return all(tensor.dim() == 4 for tensor in (query, key, value)) and not (
        len(sizes) > 1 or dropout_p or learns_mask
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return attention `[batch, heads, length, size]`; save for the backward what a fused kernel saves."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    mixed: Tensor = _SavingAttention.apply(query, key, value, attn_mask, is_causal)  # type: ignore[no-untyped-call]
    return mixed


def _attention_of_gpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return attention as on GPUs: above 16 bits, keys and values are repeated for each query head."""
    if query.itemsize > 2 and query.shape[1] != key.shape[1]:
        key, value = (repeated_heads(one, query) for one in (key, value))
    return _attention(query, key, value, *args, **kwargs)


class _SavingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        ctx.causal = causal
        output, normalisers = cpu_attention(query, key, value, causal=causal)
        ctx.save_for_backward(query, key, value, mask, output, normalisers)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, _, output, normalisers = ctx.saved_tensors
        # Called for those who count operations; its results have the strides that only CPUs give them.
        attended = Attended(query, key, value, output, normalisers)
        CPU.backward(gradient, attended, None, ctx.causal, 1.0)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _has_rms_norm_kernel(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any, **__: Any
) -> bool:
    """Return whether PyTorch has a fused kernel on GPUs for `torch.rms_norm` with these arguments."""
    return input.is_floating_point() and (weight is None or weight.dtype == input.dtype)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return the RMS norm of `input`; save `input`, `weight` and a number for each row."""
    result: Tensor = _SavingRMSNorm.apply(input, [*normalized_shape], weight, eps)  # type: ignore[no-untyped-call]
    return result


class _SavingRMSNorm(torch.autograd.Function):
    """Autograd function of RMS norm that saves for the backward what a GPU's fused kernel saves."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, normalized: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        ctx.outer = [*range(given.dim() - len(normalized))]
        ctx.inner = [*range(len(ctx.outer), given.dim())]
        with hidden_from_function_modes():
            output = torch.rms_norm(given, normalized, weight, eps)
        wide = torch.promote_types(given.dtype, torch.float32)
        rows = given.new_empty([*given.shape[: len(ctx.outer)], *[1 for _ in normalized]], dtype=wide)
        ctx.save_for_backward(given, weight, rows)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        given, weight, rows = ctx.saved_tensors
        of_given = of_weight = None
        with hidden_from_function_modes():
            of_normal = gradient.to(rows.dtype) if weight is None else gradient.to(rows.dtype) * weight
            normal = given.to(rows.dtype) * rows
            if ctx.needs_input_grad[0]:
                mean = (of_normal * normal).mean(ctx.inner, keepdim=True)
                of_given = ((of_normal - normal * mean) * rows).to(given.dtype)
            if ctx.needs_input_grad[2]:
                product = gradient * normal  # a sum over no dims would be one over all
                of_weight = (product.sum(ctx.outer) if ctx.outer else product).to(gradient.dtype)
        return of_given, None, of_weight, None
