"""Sizes of models that follow from other sizes, for those who know numbers only."""

from __future__ import annotations

INNER_MULTIPLE = 256
"""What the usual inner width of Llama is a multiple of, as in the published code."""


def usual_inner(hidden: int) -> int:
    """The inner width of Llama's MLP: 2/3 · 4 · hidden, rounded up to a multiple of 256.

    Its three matrices then hold about as many weights as the two of a GPT's (Shazeer 2020, section 2).
    """
    return -(-8 * hidden // (3 * INNER_MULTIPLE)) * INNER_MULTIPLE
