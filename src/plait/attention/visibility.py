"""Which keys each query of a sequence sees: always an interval of positions.

With a causal mask, documents and a window, a query at position p sees the keys in `[lo, hi)`:

    lo = max(start of its document, p - window + 1)
    hi = p + 1 if causal, else min(stop of its document, p + window)

All tensors are int64 on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import ModelError


def document_bounds(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each token's document, and the position after its last.

    `document_ids`: `[rows, length]`; a document is a run of equal consecutive ids of a row. Both results have
    this shape, int64.
    """
    rows, length = document_ids.shape
    if length == 0:
        return torch.zeros(rows, 0, dtype=torch.int64), torch.zeros(rows, 0, dtype=torch.int64)
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    ends = torch.ones(rows, length, dtype=torch.bool)
    ends[:, :-1] = begins[:, 1:]
    positions = torch.arange(length)
    starts = torch.where(begins, positions, 0).cummax(1).values
    stops = torch.where(ends, positions + 1, length).flip(1).cummin(1).values.flip(1)
    return starts, stops


def visible_range(
    positions: Tensor,
    length: int,
    *,
    causal: bool,
    window: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `lo` and `hi`: the queries at `positions` `[n]` see the keys at positions `lo ≤ k < hi`.

    `length`: that of the sequence. `window`: with `causal` the number of keys that a query sees, itself and
    those before it; else it sees the keys less than `window` away. `bounds`: the result of `document_bounds`,
    `[rows, length]`; None: a row is one document. Both results are `[rows, n]`, or `[1, n]` without `bounds`.
    Raises ModelError for a window of less than 1.
    """
    if window is not None and window < 1:
        raise ModelError(
            f"attention has a window of {window} tokens: give at least 1, the query itself, or None for all."
        )
    lo, hi = torch.zeros_like(positions)[None], torch.full_like(positions, length)[None]
    if bounds is not None:
        lo, hi = (bound[:, positions] for bound in bounds)
    if window is not None:
        lo, hi = lo.maximum(positions - window + 1), hi.minimum(positions + window)
    if causal:
        hi = hi.minimum(positions + 1)
    return lo, hi


def visible_indices(lo: Tensor, hi: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each query the index of the first key that it sees, and the index after the last.

    `lo`, `hi`: the result of `visible_range`, `[rows, n]`; `key_positions`: ascending, `[m]`. A query that
    sees none of these keys has two equal indices.
    """
    begin = torch.searchsorted(key_positions, lo.contiguous())
    return begin, torch.searchsorted(key_positions, hi.contiguous())


def needed_keys(lo: Tensor, hi: Tensor, key_positions: Tensor) -> Tensor:
    """Return the ascending indices of the keys that at least one query of at least one row sees.

    `lo`, `hi`: the result of `visible_range`, `[rows, n]`; `key_positions`: ascending, `[m]`.
    """
    begin, end = visible_indices(lo, hi, key_positions)
    change = torch.zeros(len(key_positions) + 1, dtype=torch.int64)
    one = torch.ones(begin.numel(), dtype=torch.int64)
    change.index_add_(0, begin.flatten(), one).index_add_(0, end.flatten(), -one)
    return change.cumsum(0)[:-1].nonzero().squeeze(1)
