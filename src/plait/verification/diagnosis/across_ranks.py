"""Hypotheses that combine tensors of several ranks: missing sums, pieces of other ranks, partial norms."""

from __future__ import annotations

import math
from itertools import combinations

import torch

from plait.verification.diagnosis.symptoms import Symptoms, bases_of, close, ranks_in_words
from plait.verification.location import StepPhase

SAME_NORM = 1e-6
"""Relative difference of two norms of the same elements, at most."""
NOT_SUMMED = (StepPhase.LOAD, StepPhase.INITIAL, StepPhase.INPUT, StepPhase.PARAMETERS)
"""Phases whose tensors are not sums over ranks."""
IN_PIECES = (
    StepPhase.LOAD,
    StepPhase.INITIAL,
    StepPhase.PARAMETERS,
    StepPhase.REDUCTION,
    StepPhase.OPTIMIZER,
)
"""Phases in which ranks of dp and cp have pieces of parameters."""


def summands(symptoms: Symptoms) -> str | None:
    """Return a sentence if the sum of the ranks' tensors over mesh axes is the expected tensor; else None."""
    first = symptoms.first
    if symptoms.phase in NOT_SUMMED:
        return None
    for axes in (*((axis,) for axis in symptoms.axes), *combinations(symptoms.axes, 2)):
        alike = [symptoms.evidence[rank] for rank in symptoms.neighbours(axes) if rank in symptoms.evidence]
        alike = [one for one in alike if torch.equal(one.expected, first.expected)]
        if len(alike) < 2 or any(one.actual.shape != first.expected.shape for one in alike):
            continue
        if all(torch.equal(one.actual, first.actual) for one in alike):
            continue  # as after a mean: it is a factor
        over = " and ".join(axes)
        for what, base in bases_of(first, symptoms.phase):
            parts = torch.stack([(one.actual - base).double() for one in alike])
            if close(parts.sum(0), (first.expected - base).double(), symptoms.slack):
                return f"the ranks of {over} hold summands of {what}: their sum over {over} is missing"
    return None


def piece_of_another(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor equals the expected piece of another tp, cp or dp rank; else None."""
    first = symptoms.first
    axes = ("tp", "cp", "dp") if symptoms.phase in IN_PIECES else ("tp", "cp")
    for rank in (rank for axis in axes for rank in symptoms.neighbours((axis,))):
        other = symptoms.evidence.get(rank, first)
        pairs = zip(bases_of(first, symptoms.phase), bases_of(other, symptoms.phase), strict=False)
        for (what, own), (_, others) in pairs:
            if other is not first and close(first.actual - own, other.expected - others, symptoms.slack):
                where = ranks_in_words([rank], symptoms)
                return f"{what} is what {where} should have: pieces go to another rank"
    return None


def later_pieces(symptoms: Symptoms) -> str | None:
    """Return a sentence if, with sequence parallelism, only `tp` ranks after 0 differ; else None."""
    wrong = {symptoms.coordinates[rank]["tp"] for rank in symptoms.evidence}
    right = {symptoms.coordinates[rank]["tp"] for rank in symptoms.compared_on} - wrong
    if not symptoms.plan.cuts_sequence or symptoms.phase is not StepPhase.FORWARD or 0 not in right:
        return None
    return (
        "only later pieces of the sequence differ: either something counts positions from the start of a "
        "piece, or it looks at positions before it (then its layer must not have the rule sequence), or it "
        "is cut elsewhere"
    )


def other_positions(symptoms: Symptoms) -> str | None:
    """Return a sentence if, under context parallelism, not all `cp` ranks differ in a layer's output."""
    wrong = {symptoms.coordinates[rank]["cp"] for rank in symptoms.evidence}
    right = {symptoms.coordinates[rank]["cp"] for rank in symptoms.compared_on} - wrong
    if symptoms.plan.cp == 1 or symptoms.phase is not StepPhase.FORWARD or not right:
        return None
    return (
        "only some ranks' positions of the sequence differ: either something counts positions from the start "
        "of a rank's part (plait.positions gives them), or keys of another rank are lost, are others, or are "
        "masked otherwise, or a layer looks at positions beside its attention"
    )


def norm(symptoms: Symptoms) -> str | None:
    """Return a sentence on what a wrong gradient norm leaves out or counts twice; None if it is right."""
    if symptoms.phase is not StepPhase.NORM:
        return None
    actual, expected = symptoms.difference.values
    if abs(actual - expected) < SAME_NORM * expected:
        return None
    plan = symptoms.plan
    for axis in symptoms.axes:
        own = [symptoms.evidence[rank] for rank in symptoms.neighbours((axis,)) if rank in symptoms.evidence]
        squares = math.fsum(float(one.actual[0]) ** 2 for one in own if one.actual.numel())
        if len(own) > 1 and abs(squares - expected**2) < SAME_NORM * expected**2:
            return (
                "it is too small: it leaves out what other ranks hold, for the squares of the ranks of "
                f"{axis} add up to what it should be"
            )
    degrees = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}
    times = [
        name for name, size in degrees.items() if size > 1 and abs(actual**2 / expected**2 / size - 1) < 1e-6
    ]
    if times:
        return f"it is too large: as if every square counted on each rank of {' or '.join(times)}"
    if actual > expected:
        alike = (
            "what several ranks hold alike is counted by more than one of them, or " if plan.world > 1 else ""
        )
        return (
            f"it is too large: either {alike}something that is no gradient (padding) counts too, or it is "
            "scaled, or another norm"
        )
    left = " (other ranks', or of some parameters)" if plan.world > 1 else " (of some parameters)"
    return f"it is too small: either it leaves out gradients{left}, or it is another norm"
