"""Softmax attention and packed documents by definition: all scores, all pairs in a mask, equal ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils.checkpoint import checkpoint

from plait.tensor.layer_values import Value

MOST_SCORES = 1 << 25
"""Scores that are held at once: of longer sequences, blocks of queries are computed again in the backward."""


class Visibility(NamedTuple):
    """Which keys a query sees."""

    causal: bool
    """None behind it."""
    window: int | None
    """Those at a distance below it; None: at any."""
    numbers: Tensor | None
    """Those of its document, by the number `[rows, length]` of each position's; None: of all."""

    def mask(self, queries: range, keys: int, device: torch.device) -> Tensor:
        """Return which of `keys` each of `queries` sees: bool `[rows or 1, 1, queries, keys]`."""
        here, there = (torch.arange(one.start, one.stop, device=device) for one in (queries, range(keys)))
        distance = here[:, None] - there
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        if self.numbers is None:
            return seen[None, None]
        numbers = self.numbers.to(device)
        of_one_document = numbers[:, queries.start : queries.stop, None] == numbers[:, None, :]
        return (seen & of_one_document)[:, None]


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Visibility,
    scale: float,
    softcap: float | None = None,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `softmax(s) v`, with scores `s = scale · q kᵀ`, or `c · tanh(s / c)` for a softcap of c.

    Tensors are `[rows, heads, length, size]`; query head h reads head `h // (heads / kv heads)` of key and
    value. `keep`: drops weights `[rows, heads, queries, keys]`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    rows, heads, queries, _ = query.shape
    block = queries if keep is not None else max(1, MOST_SCORES // max(1, rows * heads * key.shape[2]))
    parts = []
    for start in range(0, queries, block):
        own = range(start, min(start + block, queries))
        mask = sees.mask(own, key.shape[2], query.device)
        given = query[:, :, own.start : own.stop], key, value, mask
        attend = partial(masked_attention, scale=scale, softcap=softcap, keep=keep)
        parts.append(checkpoint(attend, *given, use_reentrant=False) if block < queries else attend(*given))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    keep: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return attention to the keys in `mask`, of as many heads; overridable by a `TorchFunctionMode`."""
    if has_torch_function_variadic(query, key, value):
        arguments = query, key, value, mask, scale, softcap, keep
        replaced: Tensor = handle_torch_function(masked_attention, (query, key, value), *arguments)
        return replaced
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    if keep is not None:
        weights = keep(weights)
    return (weights @ value.to(wide)).to(query.dtype)


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
