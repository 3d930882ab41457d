"""Model sizes that follow from other sizes, and checks of sizes, without importing torch."""

from __future__ import annotations

INNER_MULTIPLE = 256
"""Llama's inner width is a multiple of it, as in the published code."""


def default_inner(hidden: int) -> int:
    """Return the default inner width of Llama's MLP: 2/3 · 4 · hidden, rounded up to a multiple of 256.

    The three matrices then have about as many weights as the two of a GPT (Shazeer 2020, section 2).
    """
    return -(-8 * hidden // (3 * INNER_MULTIPLE)) * INNER_MULTIPLE


def heads_error(hidden: int, heads: int, kv_heads: int | None = None, *, rotary: bool) -> str | None:
    """Return None if attention can have these sizes, else an error text that names the nearest that fit.

    `rotary`: whether pairs of a head's features are turned, as in Llama.
    """
    if hidden % heads:
        return (
            f"model.hidden = {hidden} is not divisible by model.heads = {heads}: "
            f"set model.hidden to {multiples(hidden, heads)}, or change model.heads."
        )
    if kv_heads is not None and heads % kv_heads:
        return (
            f"model.kv_heads = {kv_heads} does not divide model.heads = {heads}: "
            f"set model.kv_heads to {divisors(heads)}."
        )
    if rotary and hidden // heads % 2:
        return (
            f"model.hidden = {hidden} over model.heads = {heads} makes heads of {hidden // heads} features, "
            f"and llama turns pairs of them: set model.hidden to {multiples(hidden, 2 * heads)}, or change "
            "model.heads."
        )
    return None


def multiples(value: int, step: int) -> str:
    """Return the positive multiples of `step` next to `value`, such as "8 or 12"."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def divisors(value: int) -> str:
    """Return the divisors of `value`, such as "1 or 2 or 4"."""
    return " or ".join(str(n) for n in range(1, value + 1) if value % n == 0)
