"""Attention of a block of queries to a block of keys, its backward, and the merge of blocks by log-sum-exp.

    forward     out = softmax(s) v and lse = log Σ exp(s) over a block's keys, with scores s = scale · q kᵀ
    merge       lse' = log(exp(lse₁) + exp(lse₂)), out' = exp(lse₁ - lse') out₁ + exp(lse₂ - lse') out₂
    backward    weights p = exp(s - lse'), with the merged lse': gradients of all keys are sums over blocks
    sinks       a score of each head without a value, merged last: lse' = log(exp(lse) + exp(sink))

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023, "FlashAttention-2". Queries
are `[rows, heads, n, size]`, keys and values `[rows, kv heads, m, size]`, each kv head for `heads / kv heads`
consecutive query heads. PyTorch's fused kernels compute a block where it has one for these tensors
(`fused_kernels`), else matrix products: for dropout of the weights and capped scores. These compute in the
wider one of float32 and the query's dtype, and hold the weights of all pairs in memory.

The dropout mask is that of the weights `[rows, heads, queries, keys]` of the whole batch and sequence. A
block makes its part, from the positions of its queries and keys, in the forward and again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from plait.plan.layout.sequence_layout import parts_of
from plait.ranks.accelerator import sent
from plait.tensor.attention.fused_kernels import Attended, FusedKernel, Gradients, fused_kernel
from plait.tensor.attention.kernel_calls import BlockCall
from plait.tensor.dropout import Dropout
from plait.tensor.dropout_mask import DimPart, DimRanges, keep_mask_of_ranges

AnyDropout = nn.Dropout | Dropout
BlockMask = Literal["full", "causal"] | Tensor
"""Which pairs of a block are computed: see `BlockCall.mask`."""
BIAS_MULTIPLE = 16
"""Rows of a bias begin at multiples of so many elements, as the efficient kernel requires."""


class Scaling(NamedTuple):
    """How scores are computed from the products of queries and keys: a factor and an optional softcap."""

    scale: float
    """Their factor."""
    softcap: float | None = None
    """The bound c of scores s that become c · tanh(s / c)."""


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of one block; weights that are kept are divided by `1 - p`."""

    p: float
    keep: Callable[[], Tensor]
    """Returns which weights stay: bool `[rows, heads, n, m]`, the same in forward and backward."""

    def factors(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of each attention weight: 0 where it is dropped, else `1 / (1 - p)`."""
        return self.keep().to(dtype).mul_(1.0 / (1.0 - self.p) if self.p < 1.0 else 1.0)


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
    """Return the output (0) and log-sum-exp (-inf) of attention to no keys, to which `merge` adds blocks.

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


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge attention sinks `[heads]`, learnt scores without a value, into `out` and `lse` in place.

    Each head has one score, as that of one more key whose value is 0. `out` becomes
    `out · sigmoid(lse - sink)`, attention whose weights, with that of the sink, add up to 1.
    Overridable by a `TorchFunctionMode`, as `sinks_gradient` is.
    """
    if has_torch_function_variadic(out, sinks):
        handle_torch_function(merge_sinks, (out, sinks), out, lse, sinks)
        return
    each = sinks.to(lse.dtype).unsqueeze(-1)
    out.mul_(torch.sigmoid(lse - each).unsqueeze(-1))
    torch.logaddexp(lse, each, out=lse)


def sinks_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of `sinks` from attention's gradient, output and log-sum-exp; None without them."""
    if sinks is None:
        return None
    if has_torch_function_variadic(gradient, sinks):
        arguments = gradient, out, lse, sinks
        found: Tensor | None = handle_torch_function(sinks_gradient, (gradient, sinks), *arguments)
        return found
    mean = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = torch.exp(sinks.to(lse.dtype).unsqueeze(-1) - lse)
    return -(weights * mean).sum((0, 2)).to(sinks.dtype)


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


def unfused_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: Scaling,
    dropout: WeightDropout | None,
) -> tuple[Tensor, Tensor]:
    """Return attention's output and log-sum-exp for a block, from separate operations (no fused kernel)."""
    scores, _ = _scores(query, key, mask, scaling)
    lse = scores.logsumexp(-1)
    # 0 for queries that see no key: -inf less -inf has no value.
    weights = _weights(scores, lse.masked_fill(lse == -math.inf, 0.0))
    if dropout is not None:
        weights *= dropout.factors(weights.dtype)
    out = torch.matmul(_by_group(weights, key), value.to(weights.dtype))
    return out.view(*query.shape[:3], value.shape[3]).to(query.dtype), lse


def unfused_backward(
    gradient: Tensor, attended: Attended, mask: Tensor | None, scaling: Scaling, dropout: WeightDropout | None
) -> Gradients:
    """Return the gradients of a block's query, key and value, from separate operations."""
    query, key, value, out, lse = attended
    scores, slopes = _scores(query, key, mask, scaling, slopes=True)
    weights = _weights(scores, lse)
    wide = weights.dtype
    factors = None if dropout is None else dropout.factors(wide)
    kept = weights if factors is None else weights * factors
    grouped = _by_group(gradient.to(wide), key)
    of_value = torch.matmul(_by_group(kept, key).mT, grouped)
    of_weights = torch.matmul(grouped, value.to(wide).mT).view_as(weights)
    if factors is not None:
        of_weights *= factors
    mean = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    of_products = weights.mul_(of_weights.sub_(mean)).mul_(scaling.scale)
    of_scores = _by_group(of_products if slopes is None else of_products.mul_(slopes), key)
    of_query = torch.matmul(of_scores, key.to(wide)).view_as(query)
    of_key = torch.matmul(of_scores.mT, _by_group(query.to(wide), key))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: Scaling, *, slopes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the scores `[rows, heads, n, m]`, -inf outside of the mask, and the derivative of their cap.

    The derivative is None without a cap, and unless `slopes`.
    """
    wide, (scale, softcap) = torch.promote_types(query.dtype, torch.float32), scaling
    products = torch.matmul(_by_group(query.to(wide), key), key.to(wide).mT)
    scores, found = products.mul_(scale).view(*query.shape[:3], key.shape[2]), None
    if softcap is not None:
        capped = scores.div_(softcap).tanh_()
        found = capped.square().neg_().add_(1.0) if slopes else None
        scores = capped.mul_(softcap)
    return scores if mask is None else scores.masked_fill_(~mask, -math.inf), found


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return `exp(scores - lse)` in the memory of `scores`."""
    return scores.sub_(lse.to(scores.dtype).unsqueeze(-1)).exp_()


def _by_group(tensor: Tensor, key: Tensor) -> Tensor:
    """Return `[rows, heads, n, …]` as `[rows, kv heads, heads / kv heads · n, …]`."""
    rows, heads, n, width = tensor.shape
    return tensor.reshape(rows, key.shape[1], heads // max(1, key.shape[1]) * n, width)


def is_active(dropout: AnyDropout | None) -> bool:
    """Return whether `dropout` is given, in training mode and has a probability above 0."""
    return dropout is not None and dropout.training and dropout.p > 0.0


def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, dropout: AnyDropout
) -> Tensor:
    """Return attention to all keys without a fused kernel, with `dropout` applied to its weights.

    The weights are `[rows, heads, queries, keys]`. The random numbers of a fused kernel would depend on the
    layout.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if causal:
        sees = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~sees, -math.inf)
    mixed: Tensor = dropout(scores.softmax(-1)) @ value
    return mixed


@dataclass(frozen=True)
class WeightDropoutMask:
    """The dropout mask of all weights of an attention call, whichever rank or kernel computes them."""

    key: int
    p: float
    first_row: int
    """In the global batch."""
    heads: DimPart
    """Which of the whole model's query heads the kernels' tensors have."""
    length: int
    """Of the whole sequence."""

    @staticmethod
    def next(dropout: AnyDropout, query: Tensor, length: int) -> WeightDropoutMask:
        """Draw the mask of the next call of `dropout`, for the heads of this rank of `tp`."""
        if not isinstance(dropout, Dropout):  # in plain PyTorch
            dropout = Dropout(dropout.p)
        key, parts = dropout.next_mask((*query.shape[:2], length, length), query.device)
        heads = parts.get(1, DimPart(0, query.shape[1]))
        return WeightDropoutMask(key, dropout.p, parts.get(0, DimPart(0, 0)).start, heads, length)

    def from_head(self, first: int) -> WeightDropoutMask:
        """Return the mask for tensors whose first head is this `tp` rank's head number `first`."""
        return replace(self, heads=self.heads._replace(start=self.heads.start + first))

    def of_call(
        self, call: BlockCall, query: Tensor, queries: Sequence[range], keys: Sequence[range]
    ) -> WeightDropout:
        """Return the dropout of one kernel call, of queries and keys at these positions.

        `query`: the block's, `[rows, heads, queries, size]`.
        """
        rows = range(query.shape[0])[call.rows]
        of_queries, of_keys = parts_of(queries, call.query), parts_of(keys, call.key)
        shape = len(rows), query.shape[1], sum(map(len, of_queries)), sum(map(len, of_keys))
        parts = {0: DimPart(self.first_row + rows.start, 0), 1: self.heads}
        ranges = {2: DimRanges(of_queries, self.length), 3: DimRanges(of_keys, self.length)}
        keep = partial(keep_mask_of_ranges, self.key, shape, self.p, parts, ranges, query.device)
        return WeightDropout(self.p, keep)
