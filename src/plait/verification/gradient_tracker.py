"""What each parameter's gradient should be at any time of a step, on one rank.

Some weight gradients are added by `I` (norms, biases: with the layer's backward), others by `W` (deferred),
a few in part by each. Which is which is seen from the numbers: after `I` a gradient holds the micro-batch's
contribution already, or is still what it was, or is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from plait.verification.reference_recording import (
    NO_TOLERANCE,
    Tolerance,
    largest_difference,
    largest_magnitude,
)

GradientKey = tuple[str, int]
"""A parameter's name, and the first of the rank's stages that add to this gradient of it."""
ParameterUse = tuple[int, int]
"""Layer of the model, micro-batch of the global batch."""


@dataclass(frozen=True)
class Contribution:
    """What one use adds to a gradient, and by how much that may be missed."""

    value: Tensor
    tolerance: Tolerance
    begun: bool = False
    """Whether `I` has added a part of it."""


@dataclass(frozen=True)
class TrackedGradient:
    """A gradient as it is and as it should be."""

    actual: Tensor
    expected: Tensor
    tolerance: Tolerance

    @property
    def holds(self) -> bool:
        """Whether it is as it should be."""
        return largest_difference(self.actual, self.expected) <= self.tolerance.allowed


@dataclass
class GradientTracker:
    """The gradients that a rank's parameters should have, as contributions come in."""

    gradients: Mapping[GradientKey, Tensor]
    """What is added to."""
    epsilon: float
    settled: dict[GradientKey, tuple[Tensor, Tolerance]] = field(default_factory=dict)
    """What is surely in it."""
    open: dict[GradientKey, dict[ParameterUse, Contribution]] = field(default_factory=dict)
    """Uses whose `I` is done and whose `W` may be to come."""

    def begin(self) -> None:
        """A step starts from zero."""
        self.settled.clear()
        self.open.clear()

    def after_input(
        self,
        which: GradientKey,
        use: ParameterUse,
        contribution: Tensor,
        tolerance: Tolerance,
        *,
        whole: bool,
    ) -> TrackedGradient | None:
        """After `I`: the gradient, if it holds the contribution already. `whole`: `W` was done as well."""
        own = self.open.setdefault(which, {})
        own[use] = Contribution(contribution, tolerance)
        if whole:
            return None
        waiting, added = self._due(which, []), self._due(which, [use])
        if added.holds and not waiting.holds:
            return self._settle(which, [use], added)
        if not waiting.holds:
            own[use] = Contribution(contribution, tolerance, begun=True)
        return None

    def after_weight(self, which: GradientKey, use: ParameterUse) -> TrackedGradient | None:
        """After `W`: the gradient. None where `I` added it already, or where others are only begun."""
        own = self.open.get(which, {})
        if use not in own:
            if any(other.begun for other in own.values()):
                return None
            due = self._due(which, [])  # I added it already, and W adds nothing again
            return None if due.holds else due
        uses, due = [use], self._due(which, [use])
        if not due.holds and any(other.begun for key, other in own.items() if key != use):
            uses, due = list(own), self._due(which, list(own))
            if not due.holds:
                return None
        return self._settle(which, uses, due)

    def left(
        self, sums: Iterable[GradientKey]
    ) -> Iterator[tuple[GradientKey, ParameterUse, TrackedGradient]]:
        """When all is done: the gradients that never were what they should be, with the first open use."""
        for which in sums:
            if self.open.get(which):
                due = self._due(which, self.open[which])
                yield which, next(iter(self.open.pop(which))), due

    def close(self, sums: Iterable[GradientKey]) -> None:
        """What was added to these is given away: they start from zero again. What is open is to come."""
        for which in sums:
            self.settled.pop(which, None)

    def accept(self, which: GradientKey, *, exactly: bool = False) -> None:
        """Start from a gradient that was wrong, and was reported; or from one that is `exactly` right now."""
        due = self._due(which, [])
        tolerance = Tolerance(due.tolerance.size, 0.0) if exactly else due.tolerance
        self.settled[which] = due.actual.detach().clone(), tolerance

    def is_begun(self, which: GradientKey) -> bool:
        """Whether `I` has added a part of what is still open."""
        return any(use.begun for use in self.open.get(which, {}).values())

    def allowed(self, name: str) -> float:
        """By how much all gradients of a parameter together may be missed."""
        return sum(tolerance.allowed for (own, _), (_, tolerance) in self.settled.items() if own == name)

    def _due(self, which: GradientKey, uses: Iterable[ParameterUse]) -> TrackedGradient:
        actual = self.gradients[which]
        before = self.settled.get(which)
        total, (size, allowed) = before or (actual.new_zeros(()).expand_as(actual), NO_TOLERANCE)
        for use in uses:
            value, tolerance = self.open[which][use].value, self.open[which][use].tolerance
            total = total + value
            size = max(size, tolerance.size, largest_magnitude(total))
            allowed += tolerance.allowed + self.epsilon * size
        return TrackedGradient(actual, total, Tolerance(size, allowed))

    def _settle(
        self, which: GradientKey, uses: Iterable[ParameterUse], due: TrackedGradient
    ) -> TrackedGradient:
        self.settled[which] = due.expected, due.tolerance
        for use in uses:
            del self.open[which][use]
        return due
