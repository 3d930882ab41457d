"""The choice between the two ways of attention under context parallelism, by the bytes that a rank sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.errors import PlanError
from plait.plan.attention_heads import sending_less, vectors_sent
from plait.tensor.running_sequence import ContextParallelism, LocalSequence


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
    method = sending_less(ring, ulysses) if asked == "auto" else asked
    return MethodChoice(query_heads, kv_heads, method, asked != "auto", ring, ulysses)
