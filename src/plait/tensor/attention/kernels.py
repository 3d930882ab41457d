"""Attention of a block of queries to a block of keys, its backward, and the merge of blocks by log-sum-exp.

    forward     out = softmax(s) v and lse = log Σ exp(s) over a block's keys, with scores s = scale · q kᵀ
    merge       lse' = log(exp(lse₁) + exp(lse₂)), out' = exp(lse₁ - lse') out₁ + exp(lse₂ - lse') out₂
    backward    weights p = exp(s - lse'), with the merged lse': gradients of all keys are sums over blocks

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023, "FlashAttention-2". Queries
are `[rows, heads, n, size]`, keys and values `[rows, kv heads, m, size]`, each kv head for `heads / kv heads`
consecutive query heads. PyTorch's fused kernels compute a block where it has one for these tensors
(`fused_kernels`), else matrix products (`unfused_kernel`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from plait.ranks.device import sent
from plait.tensor.attention.fused_kernels import Attended, FusedKernel, Gradients, fused_kernel
from plait.tensor.attention.unfused_kernel import Scaling, WeightDropout, unfused_backward, unfused_forward

BlockMask = Literal["full", "causal"] | Tensor
"""Which pairs of a block are computed: see `BlockCall.mask`."""
BIAS_MULTIPLE = 16
"""Rows of a bias begin at multiples of so many elements, as the efficient kernel requires."""


def block_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    dropout: WeightDropout | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention `[rows, heads, n, value size]` to a block of keys, and the log-sum-exp of its scores.

    The log-sum-exp `[rows, heads, n]` is in float32, for float64 tensors in float64. A query that sees no key
    has output 0 and log-sum-exp -inf. `mask`: as in `BlockCall`. `dropout`: of the weights; the log-sum-exp
    is that without dropout. `softcap`: as in `Scaling`. Overridable by a `TorchFunctionMode`, as
    `block_backward` and `merge` are.
    """
    if has_torch_function_variadic(query, key, value):
        arguments = query, key, value, mask, scale, dropout, softcap
        replaced: tuple[Tensor, Tensor] = handle_torch_function(block_forward, arguments[:3], *arguments)
        return replaced
    plain = dropout is None and softcap is None
    kernel, causal, pairs = _kernel_and_mask(query, key, value, mask, plain)
    if kernel is None:
        return unfused_forward(query, key, value, pairs, Scaling(scale, softcap), dropout)
    if pairs is None:
        return kernel.forward(query, key, value, None, causal, scale)
    bias = _bias(pairs, query)
    # Kernels differ in what they return for queries that see nothing: let them see the first key.
    fully_masked = bias.amax(1) == -math.inf
    bias[:, 0].masked_fill_(fully_masked, 0.0)
    out, lse = kernel.forward(query, key, value, _of_all_heads(bias, query), False, scale)
    return out.masked_fill_(fully_masked[:, None], 0.0), lse.masked_fill_(fully_masked, -math.inf)


def block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockMask,
    scale: float,
    dropout: WeightDropout | None = None,
    softcap: float | None = None,
) -> Gradients:
    """Return a block's summand of the gradient of `query`, and the gradients of its `key` and `value`.

    `gradient`: that of the attention to all keys; `out`, `lse`: its output, in the query's dtype, and its
    log-sum-exp. Other arguments as for `block_forward`.
    """
    if has_torch_function_variadic(gradient, query, key, value):
        arguments = gradient, query, key, value, out, lse, mask, scale, dropout, softcap
        replaced: Gradients = handle_torch_function(block_backward, arguments[:4], *arguments)
        return replaced
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # weights exp(s - lse) of 0
    attended, plain = Attended(query, key, value, out, lse), dropout is None and softcap is None
    kernel, causal, pairs = _kernel_and_mask(query, key, value, mask, plain)
    if kernel is None:
        return unfused_backward(gradient, attended, pairs, Scaling(scale, softcap), dropout)
    bias = None if pairs is None else _of_all_heads(_bias(pairs, query), query)
    return kernel.backward(gradient, attended, bias, causal, scale)


def empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of attention to no key, to which `merge` adds: 0 and -inf.

    Their dtype is the wider one of float32 and the query's. In memory, heads lie within positions.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    rows, heads, length, _ = query.shape
    out = query.new_zeros(rows, length, heads, value.shape[3], dtype=wide).transpose(1, 2)
    return out, query.new_full(query.shape[:3], -math.inf, dtype=wide)


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge attention to one block of keys into `out` and `lse` in place, by log-sum-exp.

    `out`, `lse`: views of an `empty_result` for the part's rows and queries. `part_out`, `part_lse`: from
    `block_forward`.
    """
    if has_torch_function_variadic(out, part_out):
        handle_torch_function(merge, (out, part_out), out, lse, part_out, part_lse)
        return
    # exp(part_lse) / (exp(lse) + exp(part_lse)), and 0 for queries that see none of the keys
    share = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -math.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _kernel_and_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, plain: bool
) -> tuple[FusedKernel | None, bool, Tensor | None]:
    """Return the fused kernel, whether it is to mask causally, and the pairs that are seen, None for all.

    `plain`: without dropout and softcap, which no fused kernel has. Without a kernel the pairs are a tensor
    also for a causal mask.
    """
    pairs = sent(mask, query.device) if isinstance(mask, Tensor) else None
    causal = pairs is None and mask == "causal"
    kernel = fused_kernel(query, key, value, pairs, causal) if plain else None
    if kernel is None and causal:
        pairs = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return kernel, causal, pairs


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask as a bias `[n, m]` of the scores, 0 or -inf, in the query's dtype."""
    n, m = mask.shape
    bias = query.new_zeros(n, m + -m % BIAS_MULTIPLE)[:, :m]
    return bias.masked_fill_(~mask, -math.inf)


def _of_all_heads(bias: Tensor, query: Tensor) -> Tensor:
    """Return a bias as a view `[rows, heads, n, m]`."""
    return bias.expand(*query.shape[:2], *bias.shape)
