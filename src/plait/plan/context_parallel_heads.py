"""Attention heads under context parallelism: which heads each rank needs, and how much is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Heads = Sequence[tuple[int, ...]]
"""Indices of the heads that each rank gets, ascending."""


def heads_of_ranks(query_heads: int, kv_heads: int, ranks: int) -> Heads:
    """Return for each rank the indices of the key and value heads that its query heads attend to.

    `query_heads` is a multiple of `ranks` and of `kv_heads`.
    """
    own, shared = query_heads // ranks, query_heads // kv_heads
    return [tuple(range(rank * own // shared, ((rank + 1) * own - 1) // shared + 1)) for rank in range(ranks)]


def vectors_sent(
    query_heads: int, kv_heads: int, ranks: int, *, keeps_keys: bool
) -> tuple[float, float | None]:
    """Return how many vectors of a head's size a rank sends per position, by ring and by Ulysses (or None).

    Forward and backward, on average over the ranks, without a mask. "ring": a key and a value of each head
    go to every other rank and their gradients return, `4 · kv_heads · (ranks - 1)`; half as much again where
    keys are not kept for the backward. "ulysses": queries, outputs, keys and values, and their gradients,
    `4 · (query_heads + kv_heads) · (ranks - 1) / ranks`, and more where ranks share a head of keys; outputs
    once more where they are not kept. None where the ranks do not divide the query heads.
    """
    ring = float((4 if keeps_keys else 6) * kv_heads * (ranks - 1))
    if query_heads % ranks:
        return ring, None
    held = query_heads + sum(map(len, heads_of_ranks(query_heads, kv_heads, ranks)))
    again = 0 if keeps_keys else query_heads
    return ring, (4 * held + again) * (ranks - 1) / ranks


def sending_less(ring: float, ulysses: float | None) -> Literal["ring", "ulysses"]:
    """Return "ring" or "ulysses", whichever sends fewer vectors: the choice of `context_parallel="auto"`."""
    return "ulysses" if ulysses is not None and ulysses < ring else "ring"
