"""Packed documents by definition: a document is a run of equal ids in a row; its positions count from 0."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.tensor.layer_values import Value

DOCUMENT_IDS = "document_ids"
"""The key of the ids `[rows, length]` in a batch that is a dictionary."""


def separated(batch: Value) -> tuple[Value, Tensor | None]:
    """Return a batch's values for the first layer, and its document ids, or None if it has none."""
    if not isinstance(batch, dict) or DOCUMENT_IDS not in batch:
        return batch, None
    rest = {key: value for key, value in batch.items() if key != DOCUMENT_IDS}
    return (next(iter(rest.values())) if len(rest) == 1 else rest), batch[DOCUMENT_IDS]


def numbers_of(ids: Tensor) -> Tensor:
    """Return for each position the number of its document in the row: 0, 0, 1, 1, 1, …; like `ids`."""
    begins = torch.zeros_like(ids)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins.cumsum(1)


def positions_in(ids: Tensor) -> Tensor:
    """Return each position's distance from the start of its document: int64, like `ids`."""
    numbers = numbers_of(ids)
    same = numbers.unsqueeze(2) == numbers.unsqueeze(1)
    return same.tril(-1).sum(2)
