"""Hypotheses about misplaced values: transposed, shifted, permuted, or wrong in only a part of the tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.verification.diagnosis.symptoms import Symptoms, close
from plait.verification.location import StepPhase

SHIFTS = (1, -1, 2, -2)
SLICES = 4096
"""Size of a dim, at most, for which a permutation is searched."""
SHOWN = 4
"""Permuted slices that a sentence lists."""


def transposed(symptoms: Symptoms) -> str | None:
    """Return a sentence if a square matrix equals the transpose of the expected one; else None."""
    pair = symptoms.shaped
    if pair is None or pair[0].dim() != 2 or pair[0].shape[0] != pair[0].shape[1] or len(pair[0]) < 2:
        return None
    return "it is transposed" if close(pair[0], pair[1].T, symptoms.slack) else None


def shifted(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor is shifted by a few positions along a dim; else None."""
    pair = symptoms.shaped
    if pair is None:
        return None
    actual, expected = pair
    for dim, size in enumerate(actual.shape):
        for shift in SHIFTS:
            kept = size - abs(shift)
            if kept < 2 or kept <= size / 2:
                continue  # halves that changed places
            later = actual.narrow(dim, max(shift, 0), kept), expected.narrow(dim, max(-shift, 0), kept)
            if not close(*later, symptoms.slack) or later[1].max() - later[1].min() <= symptoms.slack:
                continue
            places = "1 place" if abs(shift) == 1 else f"{abs(shift)} places"
            return f"it is shifted: along dim {dim} it stands {places} {'later' if shift > 0 else 'earlier'}"
    return None


def permuted(symptoms: Symptoms) -> str | None:
    """Return a sentence if the values are the expected ones, permuted along a dim or overall; else None."""
    actual, expected = symptoms.pair
    if len(actual) < 2 or not close(actual.sort().values, expected.sort().values, symptoms.slack):
        return None
    pair = symptoms.shaped
    gathered = "; parts were gathered to other places" if symptoms.phase is StepPhase.PARAMETERS else ""
    for dim in range(0 if pair is None else pair[0].dim()):
        assert pair is not None
        order = _order_along(dim, *pair, symptoms.slack)
        if order is not None:
            moved = [f"{there} at {here}" for here, there in enumerate(order) if here != there]
            more = f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
            return f"dim {dim} is in another order: it has {', '.join(moved[:SHOWN])}{more}{gathered}"
    return f"the same numbers stand in another order{gathered}"


def _order_along(dim: int, actual: Tensor, expected: Tensor, slack: float) -> list[int] | None:
    """Return the index in `expected` of each slice of `actual` along `dim`; None if one is not found."""
    here, there = (one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in (actual, expected))
    if not 1 < len(here) <= SLICES:
        return None
    weights = torch.rand(here.shape[1], dtype=here.dtype, generator=torch.Generator().manual_seed(0))
    order = torch.empty(len(here), dtype=torch.int64)
    order[(here @ weights).argsort()] = (there @ weights).argsort()
    if not close(here, there[order], slack):
        return None
    return [int(location) for location in order]


def part_of_a_dim(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor differs in a single range of a single dim only; else None."""
    part = range_of(symptoms)
    return None if part is None else f"only {part[1]}:{part[2]} of dim {part[0]} differs"


def positions(symptoms: Symptoms) -> str | None:
    """Return a sentence if a layer's output is right at only its first or last positions; else None."""
    part = range_of(symptoms)
    if (
        part is None
        or symptoms.phase is not StepPhase.FORWARD
        or not 0 < part[0] < len(symptoms.difference.shape) - 1
    ):
        return None
    dim, start, stop, size = part
    found = f"only {start}:{stop} of dim {dim} differs"
    if start and stop == size and start <= size / 2:
        return (
            f"{found}: if that is a sequence, its first {_positions(start)} right, as where attention has "
            "wrong scores, rotary angles or a wrong mask, which the first positions, that see little, do "
            "not show"
        )
    if not start and stop >= size / 2:
        return (
            f"{found}: if that is a sequence, its last {_positions(size - stop)} right, as where a mask "
            "lets positions see what comes after them, which the last cannot"
        )
    return None


def range_of(symptoms: Symptoms) -> tuple[int, int, int, int] | None:
    """Return (dim, start, stop, size of the dim) if the tensor differs in one range of one dim; else None."""
    difference = symptoms.difference
    if difference.whole_box or len(difference.box) != len(difference.shape):
        return None
    volume = math.prod(stop - start for start, stop in difference.box)
    if difference.share * math.prod(difference.shape) < volume / 2:
        return None  # scattered elements, by chance not in all rows
    parts = [
        (dim, start, stop, size)
        for dim, ((start, stop), size) in enumerate(zip(difference.box, difference.shape, strict=True))
        if stop - start < size
    ]
    return parts[0] if len(parts) == 1 else None


def _positions(count: int) -> str:
    return "position is" if count == 1 else f"{count} positions are"
