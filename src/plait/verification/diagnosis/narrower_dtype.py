"""Hypotheses about rounding: a tensor that was rounded to a narrower dtype, or computed from one."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.verification.diagnosis.symptoms import Symptoms, bases_of

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The narrowest first."""
HALF_STEP = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}
"""Typical relative rounding error: half of the largest."""
STEPS = 64.0
"""Error of a result computed in a narrow dtype, in rounding errors, at most."""
SPREAD = 0.95
"""Fraction of differing elements, at least, in a tensor that was computed from rounded numbers."""
ENOUGH = 16
"""Least number of elements that show a distribution."""


def rounded(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor was computed, fully or partly, in a narrower dtype; else None.

    In 16 bits only where it, or what the layer adds, has no more digits than the dtype holds: a small error
    of another kind (an epsilon, a scale, an angle) is as large as such a rounding. In float32 also where
    errors are as small as those of float32, in all elements, and as often up as down.
    """
    first = symptoms.first
    is_precise = symptoms.difference.allowed <= 1e-10 * symptoms.difference.size
    if not is_precise or first.actual.shape != first.expected.shape or not first.actual.is_floating_point():
        return None
    ulp = torch.finfo(first.actual.dtype).eps
    for what, base in bases_of(first, symptoms.phase):
        actual, expected = (first.actual - base).double(), (first.expected - base).double()
        noise = 4 * ulp * (first.actual.double().abs() + base.double().abs()) if bool(base.any()) else None
        name = _digits_of(actual, expected, noise)
        if name is not None:
            return f"{what} has no more digits than {name} holds: something on the way was {name}"
        if (found := _sum_of_narrow(actual, expected, noise)) is not None:
            return found
    if _made_of_single(symptoms):
        return (
            "it is off by as little as float32 rounds, everywhere, up and down alike: either something on "
            "the way was float32, or something very slightly else is computed"
        )
    return None


def _fits(tensor: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    """Return for each element whether `dtype` can represent it up to `noise`."""
    off = (tensor - tensor.to(dtype).double()).abs()
    return off == 0 if noise is None else off <= noise


def _digits_of(actual: Tensor, expected: Tensor, noise: Tensor | None) -> str | None:
    """Return the narrowest dtype that represents all of `actual` but at most half of `expected`, or None."""
    for name, dtype in NARROW.items():
        if not bool(_fits(actual, dtype, noise).all()):
            continue
        unexpected = ~_fits(expected, dtype, noise)
        if not bool(unexpected.any()) or float(unexpected.double().mean()) < 0.5:
            return None  # the reference has such numbers as well
        size = expected.abs() + expected.square().mean().sqrt()
        is_near = bool(((actual - expected).abs() <= STEPS * HALF_STEP[name] * size).all())
        return name if is_near else None
    return None


def _sum_of_narrow(actual: Tensor, expected: Tensor, noise: Tensor | None) -> str | None:
    """Return a sentence if the errors of float32 values are as large as 16-bit rounding errors; else None."""
    if len(actual) < ENOUGH or not bool(_fits(actual, torch.float32, noise).all()):
        return None
    if float((~_fits(expected, torch.float32, noise)).double().mean()) < 0.5:
        return None
    size = expected.abs() + expected.square().mean().sqrt()
    usual = float(((actual - expected).abs() / size).median())
    for name in ("bfloat16", "float16"):
        if HALF_STEP[name] / 16 < usual < HALF_STEP[name] * 4:
            return (
                f"it has no more digits than float32 holds, and is off by as much as {name} rounds: it is a "
                "sum of numbers in 16 bits"
            )
    return None


def _made_of_single(symptoms: Symptoms) -> bool:
    """Return whether errors are like float32 rounding: small, in all elements, and without a bias."""
    *_, (_, base) = bases_of(symptoms.first, symptoms.phase)
    actual, expected = symptoms.pair
    if len(actual) < ENOUGH or symptoms.difference.share < SPREAD or not symptoms.difference.whole_box:
        return False
    apart, own = actual - expected, expected - base.double()
    size = own.abs() + own.square().mean().sqrt()
    relative = apart.abs() / size
    if not HALF_STEP["float32"] / 64 < float(relative.median()) < 4 * HALF_STEP["float32"]:
        return False
    if float(relative.max()) > STEPS * HALF_STEP["float32"]:
        return False
    likely = 4 / len(apart) ** 0.5
    biased = abs(float(apart.sign().mean())) > likely
    return not biased and all(abs(_correlation(apart, other)) < likely for other in (expected, own))


def _correlation(one: Tensor, other: Tensor) -> float:
    product = float(one.norm() * other.norm())
    return float(one @ other) / product if product else 0.0
