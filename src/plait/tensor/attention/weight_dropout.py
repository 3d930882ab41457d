"""Dropout of attention weights, of all at once or block by block, with the same mask.

The mask is that of the weights `[rows, heads, queries, keys]` of the whole batch and sequence. A block makes
its part, from the positions of its queries and keys: once in the forward, and again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from plait.plan.layout.sequence_layout import parts_of
from plait.tensor.attention.unfused_kernel import WeightDropout
from plait.tensor.attention.visibility import BlockCall
from plait.tensor.dropout import Dropout
from plait.tensor.dropout_mask import DimPiece, DimRanges, keep_mask_of_ranges

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
    heads: DimPiece
    """Which of the whole model's query heads the kernels' tensors have."""
    length: int
    """Of the whole sequence."""

    @staticmethod
    def next(
        dropout: AnyDropout, rows: int, query_heads: int, length: int, device: torch.device
    ) -> WeightDropoutMask:
        """Return the mask of the next call of `dropout`, for all `query_heads` that this rank of `tp` has."""
        if not isinstance(dropout, Dropout):  # in plain PyTorch
            dropout = Dropout(dropout.p)
        key, pieces = dropout.next_mask((rows, query_heads, length, length), device)
        heads = pieces.get(1, DimPiece(0, query_heads))
        return WeightDropoutMask(key, dropout.p, pieces.get(0, DimPiece(0, 0)).start, heads, length)

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
        pieces = {0: DimPiece(self.first_row + rows.start, 0), 1: self.heads}
        ranges = {2: DimRanges(of_queries, self.length), 3: DimRanges(of_keys, self.length)}
        keep = partial(keep_mask_of_ranges, self.key, shape, self.p, pieces, ranges, query.device)
        return WeightDropout(self.p, keep)
