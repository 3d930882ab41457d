"""Rows that are copies of tokens, and sums of each token's rows, in the same order each time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class TokenRows:
    """Rows that are copies of T tokens; a token may have several, or none. All tensors are int32."""

    tokens: Tensor
    """`[rows]`: the token of each row."""
    by_token: Tensor
    """`[rows]`: numbers of rows in order of the token, and for one token in their own order."""
    starts: Tensor
    """`[T]`: where in `by_token` each token's rows begin."""

    @staticmethod
    def of(tokens: Tensor, counts: Tensor) -> TokenRows:
        """`tokens [rows]`: the token of each row; `counts [T]`: how many rows each token has."""
        starts = counts.cumsum(0, dtype=torch.int32) - counts
        return TokenRows(tokens.int(), tokens.argsort(stable=True).int(), starts.int())

    def copies(self, tokens: Tensor) -> Tensor:
        """Return the rows `[rows, width]` of tokens `[T, width]`."""
        return tokens.index_select(0, self.tokens)

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, `[T, width]`."""
        return functional.embedding_bag(self.by_token, rows, self.starts, mode="sum")
