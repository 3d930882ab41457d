"""The choice between the two ways of attention under context parallelism, by the bytes that a rank sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.autograd.running_sequence import ContextParallelism, LocalSequence
from plait.context_attention.ulysses import heads_of_ranks
from plait.errors import PlanError


@dataclass(frozen=True)
class MethodChoice:
    """The method of one attention on the ranks of `cp`, and what each method sends."""

    query_heads: int
    """The number of query heads of this rank of `tp`."""
    kv_heads: int
    """The number of its heads of keys and values."""
    method: Literal["ring", "ulysses"]
    asked: bool
    """Whether the plan asks for the method; else it sends fewer bytes."""
    ring: float
    """The vectors, as wide as a head, that a rank sends for each of its positions, forward and backward."""
    ulysses: float | None
    """The same for the other method; None where the ranks do not divide the query heads."""

    def __str__(self) -> str:
        """Return a sentence for a report, without the final dot."""
        other = (
            "ulysses needs a multiple of the ranks" if self.ulysses is None else f"ulysses {self.ulysses:g}"
        )
        heads = f"{self.query_heads} query heads and {self.kv_heads} of keys"
        why = "as the plan asks" if self.asked else "which sends less"
        return (
            f"Attention with {heads}: {self.method}, {why} (vectors a position: ring {self.ring:g}, {other})"
        )


def vectors_sent(
    query_heads: int, kv_heads: int, ranks: int, *, keeps_keys: bool
) -> tuple[float, float | None]:
    """Return how many vectors of a head a rank sends for each of its positions, with "ring" and "ulysses".

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


def method_choice(sequence: LocalSequence, query_heads: int, kv_heads: int) -> MethodChoice:
    """Return the method of an attention whose sequence is divided over `cp`, as its plan asks.

    Raises PlanError where "ulysses" is asked for and the ranks do not divide the query heads.
    """

    def compute() -> MethodChoice:
        return choose_method(sequence.parallelism, query_heads, kv_heads)

    return sequence.result(("method", query_heads, kv_heads), compute)


def choose_method(parallelism: ContextParallelism, query_heads: int, kv_heads: int) -> MethodChoice:
    """Return the method of an attention with these heads; see `method_choice`."""
    ranks, asked = parallelism.group.size, parallelism.method
    ring, ulysses = vectors_sent(query_heads, kv_heads, ranks, keeps_keys=parallelism.keeps_keys)
    if asked == "ulysses" and ulysses is None:
        raise PlanError(
            f"plan.context_parallel is 'ulysses', but {query_heads} heads do not divide over plan.cp = "
            f"{ranks} ranks: choose 'ring', or a divisor for cp."
        )
    less: Literal["ring", "ulysses"] = "ulysses" if ulysses is not None and ulysses < ring else "ring"
    method = less if asked == "auto" else asked
    return MethodChoice(query_heads, kv_heads, method, asked != "auto", ring, ulysses)
