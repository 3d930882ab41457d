"""Copies of tokens as rows, and sums of each token's rows, in the same order each time."""

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
    """`[rows]`: numbers of rows in order of the token, and for one token of the place."""
    starts: Tensor
    """`[T]`: where in `by_token` each token's rows begin."""

    @staticmethod
    def of(places: Tensor, tokens: int, columns: int) -> TokenRows:
        """Return rows that copy tokens, from distinct `places [rows]` in flattened `[tokens, columns]`."""
        count, device = len(places), places.device
        is_row = torch.zeros(tokens * columns, dtype=torch.bool, device=device).scatter_(0, places, True)
        numbers = is_row.cumsum(0)  # from 1, in order of the token
        rows = torch.arange(count, dtype=torch.int32, device=device)
        by_token = torch.empty_like(rows).scatter_(0, numbers.index_select(0, places).sub_(1), rows)
        first = slice(None, None, columns)
        starts = numbers[first].int() - is_row[first].int()
        return TokenRows((places // columns).int(), by_token, starts)

    def copies(self, tokens: Tensor) -> Tensor:
        """Return the rows `[rows, width]` of tokens `[T, width]`."""
        return tokens.index_select(0, self.tokens)

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, `[T, width]`."""
        return functional.embedding_bag(self.by_token, rows, self.starts, mode="sum")
