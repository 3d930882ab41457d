"""The norm by which two sets of tensors are equal: `max|a − b| ≤ tolerance · max(max|b|, floor · largest b)`.

The floor is there because some gradients are exactly zero (the key bias of attention): their noise must not
decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
FLOOR = 1e-3


def ratios(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """For each name, how much of what the norm allows is used up: at most 1 is equal, NaN is infinity."""
    largest = max((_peak(tensor) for tensor in expected.values()), default=0.0)
    result = {}
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, f"{name}: {actual[name].shape} is not {tensor.shape}"
        difference = _peak(actual[name].double() - tensor.double())
        allowed = tolerance * max(_peak(tensor), FLOOR * largest)
        result[name] = _quotient(difference, allowed)
    return result


def assert_equal(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    """AssertionError that names the worst tensor and its ratio. Both have to bear the same names."""
    assert actual.keys() == expected.keys(), (
        f"{what}: only on one side are {', '.join(sorted(actual.keys() ^ expected.keys()))}"
    )
    used = ratios(actual, expected, tolerance)
    worst = max(used, key=lambda name: used[name], default=None)
    if worst is not None and used[worst] > 1:
        wrong = sum(ratio > 1 for ratio in used.values())
        raise AssertionError(
            f"{what} of {worst} is {used[worst]:.3g} times further off than the norm allows "
            f"({tolerance:g}); {wrong} of {len(used)} are off."
        )


def assert_close(actual: float, expected: float, tolerance: float, what: str) -> None:
    """The same for one number, relative to itself."""
    ratio = _quotient(abs(actual - expected), tolerance * abs(expected))
    assert ratio <= 1, (
        f"{what} is {actual!r} instead of {expected!r}: {ratio:.3g} times further off than the norm allows "
        f"({tolerance:g})."
    )


def _peak(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _quotient(difference: float, allowed: float) -> float:
    if difference == 0:
        return 0.0
    if math.isnan(difference) or allowed == 0:
        return math.inf
    return difference / allowed
