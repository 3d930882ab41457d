"""The probable cause in a report: the surest hypothesis that fits, or what is known."""

from __future__ import annotations

from collections.abc import Callable

from plait.verification.diagnosis.across_ranks import later_pieces, norm, piece_of_another, summands
from plait.verification.diagnosis.arithmetic import factor, multiple_of_input, no_number, same_for_all, zero
from plait.verification.diagnosis.arrangement import part_of_a_dim, permuted, positions, shifted, transposed
from plait.verification.diagnosis.known import known_of
from plait.verification.diagnosis.rounding import rounded
from plait.verification.diagnosis.symptoms import Symptoms
from plait.verification.diagnosis.wording import circumstances

Hypothesis = Callable[[Symptoms], str | None]
"""Returns a sentence where the evidence fits it and, as far as can be told, nothing else."""
HYPOTHESES: tuple[Hypothesis, ...] = (
    no_number,
    norm,
    summands,
    zero,
    factor,
    multiple_of_input,
    piece_of_another,
    rounded,
    same_for_all,
    transposed,
    shifted,
    permuted,
    later_pieces,
    positions,
)
"""The surest first."""


def likely_cause(symptoms: Symptoms) -> str:
    """Return one sentence: the first hypothesis that fits, the place inside the layer, circumstances."""
    difference = symptoms.difference
    fitting = (hypothesis(symptoms) for hypothesis in HYPOTHESES)
    found = difference.hint or next((text for text in fitting if text), None)
    if found is None:
        part = part_of_a_dim(symptoms)
        found = f"{part}; {known_of(symptoms)}" if part else known_of(symptoms)
    elif difference.inside is not None:
        found = f"{found}; {difference.inside.sentence}"
    return "; ".join([found, *circumstances(symptoms)]) + "."
