"""Masks of attention: which keys each query of a sequence sees.

With a causal mask, documents and a window, a query at position p sees the keys at positions in `[lo, hi)`:

    lo = max(start of its document, p - window + 1)
    hi = p + 1 if causal, else min(stop of its document, p + window)

Arrays are int64; they are made on the host for each micro-batch of packed documents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ModelError
from plait.tensor.running_sequence import DocumentBounds

Indices = NDArray[np.int64]


def document_bounds(document_ids: Tensor) -> DocumentBounds:
    """Return where documents begin; a document is a run of equal ids in a row of `document_ids`.

    `document_ids`: `[rows, length]`, on the CPU; negative ones are those of padding.
    """
    ids = document_ids.numpy()
    first = [0] if ids.shape[1] else []
    begins = ids[:, 1:] != ids[:, :-1]
    starts = tuple((*first, *(np.flatnonzero(row) + 1).tolist()) for row in begins)
    padding: tuple[tuple[int, ...], ...] = ()
    if (ids < 0).any():
        padding = tuple(
            tuple(np.flatnonzero(row[list(first)] < 0).tolist())
            for row, first in zip(ids, starts, strict=True)
        )
    return DocumentBounds(ids.shape[1], starts, padding)


def visible_range(
    positions: Indices,
    length: int,
    *,
    causal: bool,
    window: int | None = None,
    documents: DocumentBounds | None = None,
) -> tuple[Indices, Indices]:
    """Return `lo` and `hi`: the queries at `positions` `[n]` see the keys at positions `lo ≤ k < hi`.

    `length`: that of the sequence. `window`: with `causal` the number of keys that a query sees, itself and
    those before it; else it sees the keys less than `window` away. `documents`: None where a row is
    one document. Both results are `[rows, n]`, or `[1, n]` without `documents`. Raises ModelError for a
    window of less than 1.
    """
    if window is not None and window < 1:
        raise ModelError(
            f"attention has a window of {window} tokens: give at least 1, the query itself, or None for all."
        )
    lo, hi = np.zeros_like(positions)[None], np.full_like(positions, length)[None]
    if documents is not None:
        lo, hi = documents.by_position().take(positions, axis=-1)
    if window is not None:
        lo, hi = np.maximum(lo, positions - window + 1), np.minimum(hi, positions + window)
    if causal:
        hi = np.minimum(hi, positions + 1)
    return lo, hi


def visible_indices(lo: Indices, hi: Indices, key_positions: Indices) -> tuple[Indices, Indices]:
    """Return for each query the index of the first key that it sees, and the index after the last.

    `lo`, `hi`: the result of `visible_range`, `[rows, n]`; `key_positions`: ascending, `[m]`. A query that
    sees none of these keys has two equal indices.
    """
    keys_before = np.zeros(int(hi.max(initial=0)) + 1, dtype=np.int64)
    keys_before[key_positions[key_positions < len(keys_before) - 1] + 1] = 1
    keys_before = keys_before.cumsum()
    return keys_before[lo], keys_before[hi]


def needed_keys(begin: Indices, end: Indices, count: int) -> NDArray[np.bool_]:
    """Return for each of `count` keys whether some query of some row sees it.

    `begin`, `end`: the result of `visible_indices`.
    """
    change = np.bincount(begin.ravel(), minlength=count + 1) - np.bincount(end.ravel(), minlength=count + 1)
    needed: NDArray[np.bool_] = change.cumsum()[:-1] > 0
    return needed
