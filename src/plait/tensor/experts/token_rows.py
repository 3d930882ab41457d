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
    """`[rows]`: numbers of rows in order of the token, and for one token of the column in `is_row`."""
    starts: Tensor
    """`[T]`: where in `by_token` each token's rows begin."""

    @staticmethod
    def of(places: Tensor, is_row: Tensor) -> TokenRows:
        """`is_row`: bool `[T, columns]`, true once for each row; `places [rows]`: where, in it flattened."""
        count, columns = len(places), is_row.shape[1]
        numbers = is_row.flatten().cumsum(0)  # from 1, in order of the token
        by_token = torch.empty(count, dtype=torch.int32, device=places.device)
        rows = torch.arange(count, dtype=torch.int32, device=places.device)
        by_token.scatter_(0, numbers.index_select(0, places).sub_(1), rows)
        starts = numbers.view(-1, columns)[:, 0].int() - is_row[:, 0].int()
        return TokenRows((places // columns).int(), by_token, starts)

    def copies(self, tokens: Tensor) -> Tensor:
        """Return the rows `[rows, width]` of tokens `[T, width]`."""
        return tokens.index_select(0, self.tokens)

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, `[T, width]`."""
        return functional.embedding_bag(self.by_token, rows, self.starts, mode="sum")
