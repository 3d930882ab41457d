"""The first difference, with the tensors of all ranks, and the functions by which hypotheses examine it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.plan.axes import axes_of, grids, index_along, sizes_of_plan
from plait.plan.parameter_units import kind_of
from plait.plan.plan import Plan
from plait.proof.optimizer_proof import Partitioning
from plait.verification.findings import Difference, Evidence
from plait.verification.step_location import StepPhase

FITS, ROUGHLY = 1e-6, 1e-3
"""Fraction of a difference that a hypothesis may leave unexplained, and at most where rounding is large."""
AXES = ("tp", "cp", "dp", "pp")
NOT_SUMMED = (StepPhase.LOAD, StepPhase.INITIAL, StepPhase.INPUT, StepPhase.PARAMETERS)
"""Phases whose tensors are not sums over ranks."""


@dataclass(frozen=True)
class Symptoms:
    """The first difference from the reference run, with the tensors of all ranks that have it."""

    difference: Difference
    evidence: Mapping[int, Evidence]
    """By rank, the tensors of ranks whose first difference is at this location."""
    coordinates: Sequence[Mapping[str, int]]
    """Coordinate of every rank."""
    compared_on: Sequence[int]
    """The ranks that compared a tensor at this location."""
    plan: Plan
    partitioned: bool = False
    """Whether the layer has a parameter that is partitioned over `tp`."""

    of_experts: bool = False
    """Whether the layer, or without one the model, has experts that are divided over `ep` and `etp`."""

    has_router_losses: bool = False
    """Whether the layer has a router with auxiliary losses."""

    @property
    def phase(self) -> StepPhase:
        """The phase of the step in which the difference was found: forward, backward, norm, update, …."""
        return self.difference.location.phase

    @property
    def slack(self) -> float:
        """The largest error of a hypothesis's prediction with which it still fits."""
        largest = self.difference.largest
        return max(FITS * largest, min(4 * self.difference.allowed, ROUGHLY * largest))

    @property
    def first(self) -> Evidence:
        """Actual and expected tensor of the lowest rank that has the difference."""
        return self.evidence[min(self.evidence)]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Actual and expected values on the lowest rank that has the difference, flat float64."""
        return self.first.actual.double(), self.first.expected.double()

    @property
    def shaped(self) -> tuple[Tensor, Tensor] | None:
        """Actual and expected values in the tensor's shape; None if they are truncated or sizes differ."""
        actual, expected = self.pair
        shape = self.difference.shape
        if not len(actual) == len(expected) == torch.Size(shape).numel():
            return None
        return actual.view(shape), expected.view(shape)

    def neighbours(self, axes: Sequence[str]) -> list[int]:
        """Return the ranks whose coordinates equal the lowest differing rank's, except along `axes`."""
        lowest = min(self.evidence)
        own = self.coordinates[lowest]
        free = {part for axis in axes for part in ((axis,) if axis in own else axes_of(axis))}
        grid = next((grid for grid in grids(own) if free.intersection(own) <= set(grid)), None)
        if grid is None:  # axes of dense parameters and of experts
            return [lowest]
        return [
            rank
            for rank, coordinate in enumerate(self.coordinates)
            if all(coordinate[axis] == own[axis] for axis in grid if axis not in free)
        ]

    def equal_along(self, axis: str) -> set[int]:
        """Return the indices along a mesh axis of ranks that compared a tensor here and found it equal."""
        wrong = {self.coordinates[rank][axis] for rank in self.evidence}
        return {self.coordinates[rank][axis] for rank in self.compared_on} - wrong

    @property
    def axes(self) -> Sequence[str]:
        """Names of the mesh axes over which tensors may be summed."""
        is_hybrid = kind_of(self.plan).sharded and self.plan.replicate > 1
        of_data = ("replicate", "dp") if is_hybrid else ("dp",)
        of_experts = ("edp", "etp") if self.plan.divides_experts else ()
        return ("tp", *(("cp",) if self.plan.cp > 1 else ()), *of_experts, *of_data, "pp")


def bases_of(evidence: Evidence, phase: StepPhase) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors to subtract from actual and expected values, each after a text for what remains."""
    yield "all of it", torch.zeros_like(evidence.expected)
    if evidence.base is not None:
        yield REST.get(phase, "what the layer adds to it"), evidence.base


REST = {
    StepPhase.OPTIMIZER: "the update",
    StepPhase.WEIGHT_GRADIENT: "what the micro-batch adds",
    StepPhase.INPUT_GRADIENT: "what the layer adds to the gradient",
}
"""Name of a tensor of a phase minus its base (see `Evidence`)."""


def close(a: Tensor, b: Tensor, slack: float) -> bool:
    """Return whether two tensors have the same shape and differ by at most `slack` in each element."""
    return a.shape == b.shape and bool(((a - b).abs() <= slack).all())


def either(suspects: Sequence[str]) -> str:
    """Return alternatives as text: `either a, or b, or c`."""
    *most, last = suspects
    return f"either {', or '.join(most)}, or {last}" if most else last


def of_the_optimizer(plan: Plan) -> str:
    """Return the possible causes of a wrong optimizer step with right gradients, as text."""
    suspects = ["it has another setting (its rate, a decay, a beta, its epsilon)", "its state is another"]
    if Partitioning.of(plan, [kind_of(plan)]).sharded:
        suspects.append("its update is not elementwise, and it sees only a part")
    return either(suspects)


def ranks_in_words(ranks: Sequence[int], symptoms: Symptoms) -> str:
    """Return text that names ranks: by their indices along an axis if these are unique, or by number."""
    sizes = sizes_of_plan(symptoms.plan)
    for axis in AXES:
        indices, others = (
            {index_along(axis, symptoms.coordinates[rank], sizes) for rank in group}
            for group in (ranks, symptoms.evidence)
        )
        if not indices & others:
            return f"{axis} {', '.join(map(str, sorted(indices)))}"
    return f"rank {', '.join(map(str, ranks))}"
