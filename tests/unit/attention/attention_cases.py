"""Layouts of a sequence over ranks, and its mask pair by pair."""

from __future__ import annotations

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
