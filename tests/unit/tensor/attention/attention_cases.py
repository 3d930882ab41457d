"""Layouts of a sequence over ranks, and its mask pair by pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def contiguous(length: int, ranks: int, rank: int) -> Tensor:
    return torch.arange(length).tensor_split(ranks)[rank]


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    chunks = torch.arange(length).tensor_split(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def striped(length: int, ranks: int, rank: int) -> Tensor:
    return torch.arange(length)[rank::ranks]


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def visible(
    queries: Tensor, keys: Tensor, *, causal: bool, window: int | None, ids: Tensor | None = None
) -> Tensor:
    """Whether each query sees each key: `[rows, queries, keys]`, with one row without documents."""
    distance = queries[:, None] - keys
    mask = torch.ones_like(distance, dtype=torch.bool)[None]
    if causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance.abs() < window)
    if ids is not None:
        # Equal ids of one run: no id between them differs.
        runs = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))[:, : ids.shape[1]]
        mask = mask & (runs[:, queries, None] == runs[:, None, keys])
    return mask


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, factors: Tensor | None = None
) -> Tensor:
    """Softmax attention under a mask, written down as it is defined; 0 for queries that see nothing."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~mask, -math.inf)
    weights = torch.where(mask.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0)
    return (weights if factors is None else weights * factors) @ value


def random_inputs(
    *,
    rows: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    n: int = 37,
    m: int = 53,
    size: int = 8,
    width: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in float64; their scores reach about ± 4."""
    return (
        torch.randn(rows, heads, n, size, dtype=torch.float64),
        torch.randn(rows, kv_heads, m, size, dtype=torch.float64),
        torch.randn(rows, kv_heads, m, width, dtype=torch.float64),
    )
