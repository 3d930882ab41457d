"""Default sizes of models that are derived from other sizes, without importing torch."""

from __future__ import annotations

INNER_MULTIPLE = 256
"""Llama's inner width is a multiple of it, as in the published code."""


def default_inner(hidden: int) -> int:
    """Return the default inner width of Llama's MLP: 2/3 · 4 · hidden, rounded up to a multiple of 256.

    The three matrices then have about as many weights as the two of a GPT (Shazeer 2020, section 2).
    """
    return -(-8 * hidden // (3 * INNER_MULTIPLE)) * INNER_MULTIPLE
