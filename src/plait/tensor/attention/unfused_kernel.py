"""A block of attention by matrix products, for what no fused kernel computes: dropout, capped scores.

Computes in the wider one of float32 and the query's dtype, and holds the weights of all pairs in memory.

The mask is that of the weights `[rows, heads, queries, keys]` of the whole batch and sequence. A block makes
its part, from the positions of its queries and keys: once in the forward, and again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.plan.layout.sequence_layout import parts_of
from plait.tensor.attention.fused_kernels import Attended, Gradients
from plait.tensor.attention.visibility import BlockCall
from plait.tensor.dropout import Dropout
from plait.tensor.dropout_mask import DimPart, DimRanges, keep_mask_of_ranges


class Scaling(NamedTuple):
    """How scores are computed from the products of queries and keys: a factor and an optional softcap."""

    scale: float
    """Their factor."""
    softcap: float | None = None
    """The bound c of scores s that become c · tanh(s / c)."""


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of one block: those that stay are divided by `1 - p`."""

    p: float
    keep: Callable[[], Tensor]
    """Returns which weights stay: bool `[rows, heads, n, m]`, the same in forward and backward."""

    def factors(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of each weight: 0 or `1 / (1 - p)`."""
        return self.keep().to(dtype).mul_(1.0 / (1.0 - self.p) if self.p < 1.0 else 1.0)


def unfused_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: Scaling,
    dropout: WeightDropout | None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; see `block_forward`."""
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
    """Return the gradients of query, key and value; see `block_backward`."""
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


AnyDropout = nn.Dropout | Dropout


def is_active(dropout: AnyDropout | None) -> bool:
    """Return whether `dropout` sets any weight to zero."""
    return dropout is not None and dropout.training and dropout.p > 0.0


def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, dropout: AnyDropout
) -> Tensor:
    """Return attention to all keys whose weights `[rows, heads, queries, keys]` pass through `dropout`.

    No fused kernel: its random numbers would depend on the layout.
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
    """Dropout's mask of all weights of one call of attention: a function of rows, heads and positions."""

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
        """Return the mask of the next call of `dropout`; `query` has all heads of this rank of `tp`."""
        if not isinstance(dropout, Dropout):  # in plain PyTorch
            dropout = Dropout(dropout.p)
        key, parts = dropout.next_mask((*query.shape[:2], length, length), query.device)
        heads = parts.get(1, DimPart(0, query.shape[1]))
        return WeightDropoutMask(key, dropout.p, parts.get(0, DimPart(0, 0)).start, heads, length)

    def from_head(self, first: int) -> WeightDropoutMask:
        """Return the mask for tensors that begin at the head `first` of this rank of `tp`."""
        return replace(self, heads=self.heads._replace(start=self.heads.start + first))

    def of_call(
        self, call: BlockCall, query: Tensor, queries: Sequence[range], keys: Sequence[range]
    ) -> WeightDropout:
        """Return the dropout of one kernel call on a block; `queries` and `keys` are the block's positions.

        `query`: the block's, `[rows, heads, queries, size]`.
        """
        rows = range(query.shape[0])[call.rows]
        of_queries, of_keys = parts_of(queries, call.query), parts_of(keys, call.key)
        shape = len(rows), query.shape[1], sum(map(len, of_queries)), sum(map(len, of_keys))
        parts = {0: DimPart(self.first_row + rows.start, 0), 1: self.heads}
        ranges = {2: DimRanges(of_queries, self.length), 3: DimRanges(of_keys, self.length)}
        keep = partial(keep_mask_of_ranges, self.key, shape, self.p, parts, ranges, query.device)
        return WeightDropout(self.p, keep)
