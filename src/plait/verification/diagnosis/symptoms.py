"""The first difference as all ranks see it, and the comparisons that every hypothesis is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.coordinates import axes_of
from plait.plan import Plan
from plait.verification.findings import Difference, Evidence
from plait.verification.location import StepPhase

FITS, ROUGHLY = 1e-6, 1e-3
"""A hypothesis fits where it explains the difference but for the first part of it; where rounding is larger,
up to the second."""
AXES = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Symptoms:
    """What is known of the first difference."""

    difference: Difference
    evidence: Mapping[int, Evidence]
    """By rank: the tensors of those whose first difference is at this place."""
    coordinates: Sequence[Mapping[str, int]]
    """Of every rank."""
    judges: Sequence[int]
    """The ranks that compared a tensor at this place."""
    plan: Plan
    partitioned: bool = False
    """Whether the layer has a parameter that is cut over `tp`."""

    @property
    def phase(self) -> StepPhase:
        """The phase of the difference."""
        return self.difference.location.phase

    @property
    def slack(self) -> float:
        """By how much the prediction of a hypothesis may miss the tensor, absolute."""
        largest = self.difference.largest
        return max(FITS * largest, min(4 * self.difference.allowed, ROUGHLY * largest))

    @property
    def first(self) -> Evidence:
        """The tensors of the first rank that differs."""
        return self.evidence[min(self.evidence)]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Actual and expected on the first rank that differs, flat float64."""
        return self.first.actual.double(), self.first.expected.double()

    @property
    def shaped(self) -> tuple[Tensor, Tensor] | None:
        """Actual and expected in the tensor's shape; None where that was shortened, or has other sizes."""
        actual, expected = self.pair
        shape = self.difference.shape
        if not len(actual) == len(expected) == torch.Size(shape).numel():
            return None
        return actual.view(shape), expected.view(shape)

    def neighbours(self, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from the first that is wrong along `axes` only, itself included."""
        own = self.coordinates[min(self.evidence)]
        free = {part for axis in axes for part in axes_of(axis)}
        return [
            rank
            for rank, coordinate in enumerate(self.coordinates)
            if all(index == own[axis] for axis, index in coordinate.items() if axis not in free)
        ]

    @property
    def axes(self) -> Sequence[str]:
        """The axes over which something may be summed: with hybrid sharding `replicate` by itself too."""
        is_hybrid = self.plan.shards and self.plan.replicate > 1
        return ("tp", "replicate", "dp", "pp") if is_hybrid else AXES


def bases_of(evidence: Evidence, phase: StepPhase) -> Iterator[tuple[str, Tensor]]:
    """Yield (name of the rest, tensor to subtract) for each split of a tensor; the first subtracts zero."""
    yield "all of it", torch.zeros_like(evidence.expected)
    if evidence.base is not None:
        yield REST.get(phase, "what the layer adds to it"), evidence.base


REST = {
    StepPhase.OPTIMIZER: "the update",
    StepPhase.WEIGHT_GRADIENT: "what the micro-batch adds",
    StepPhase.INPUT_GRADIENT: "what the layer adds to the gradient",
}
"""Without the base of the phase (see `Evidence`): what is left."""


def close(a: Tensor, b: Tensor, slack: float) -> bool:
    """Whether two tensors have one shape and differ by no more than `slack` in any element."""
    return a.shape == b.shape and bool(((a - b).abs() <= slack).all())
