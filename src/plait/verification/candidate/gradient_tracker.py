"""The expected value of each parameter's gradient at every time of a step, on one rank.

Some weight gradients are added by `I` (norms, biases: with the layer's backward), others by `W` (deferred),
a few in part by each. The values show which: after `I` a gradient contains the micro-batch's contribution, or
is unchanged, or is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from plait.verification.reference.recording import (
    NO_TOLERANCE,
    Tolerance,
    largest_difference,
    largest_magnitude,
)

GradientKey = tuple[str, int]
"""Name of a parameter, and the first of the rank's stages that add to this gradient of it."""
ParameterUse = tuple[int, int]
"""A layer of the model, and a micro-batch of the global batch."""


@dataclass(frozen=True)
class Contribution:
    """The gradient that a layer's backward of one micro-batch adds to a parameter's, with a tolerance."""

    value: Tensor
    tolerance: Tolerance
    partial: bool = False
    """Whether `I` has added a part of the value."""


@dataclass(frozen=True)
class TrackedGradient:
    """The actual and the expected value of an accumulated gradient, with a tolerance."""

    actual: Tensor
    expected: Tensor
    tolerance: Tolerance

    @property
    def equal(self) -> bool:
        """Whether actual and expected gradient are equal up to the tolerance."""
        return largest_difference(self.actual, self.expected) <= self.tolerance.allowed


@dataclass
class GradientTracker:
    """Expected accumulated gradients of a rank's parameters, updated after each backward of a layer."""

    gradients: Mapping[GradientKey, Tensor]
    """The accumulated gradients of the engine."""
    epsilon: float
    total: Callable[[Tensor], Tensor] = lambda gradient: gradient
    """Returns the sum of a gradient over the ranks that add to it in this backward; equal on all of them."""
    settled: dict[GradientKey, tuple[Tensor, Tolerance]] = field(default_factory=dict)
    """The expected value from contributions that are known to be added."""
    open: dict[GradientKey, dict[ParameterUse, Contribution]] = field(default_factory=dict)
    """Contributions of uses whose `I` is done, and whose `W` may still follow."""

    def begin_step(self) -> None:
        """Expect all gradients to be zero, as at the start of a step."""
        self.settled.clear()
        self.open.clear()

    def after_input(
        self,
        gradient: GradientKey,
        use: ParameterUse,
        contribution: Tensor,
        tolerance: Tolerance,
        *,
        until_weight: bool,
    ) -> TrackedGradient | None:
        """Record a layer's `contribution`; if input backward (`I`) added all of it, return the gradient.

        `until_weight`: leave the comparison to `W`.
        """
        own = self.open.setdefault(gradient, {})
        own[use] = Contribution(contribution, tolerance)
        if until_weight:
            return None
        unchanged, added = self._tracked(gradient, []), self._tracked(gradient, [use])
        if added.equal and not unchanged.equal:
            return self._settle(gradient, [use], added)
        if not unchanged.equal:
            own[use] = Contribution(contribution, tolerance, partial=True)
        return None

    def after_weight(self, gradient: GradientKey, use: ParameterUse) -> TrackedGradient | None:
        """Return the gradient to compare after the weight backward `W`; None if there is nothing to compare.

        None where `I` had added the whole contribution, and `W` rightly nothing; and where the contribution
        of another use is only partly added.
        """
        own = self.open.get(gradient, {})
        if use not in own:
            if any(other.partial for other in own.values()):
                return None
            tracked = self._tracked(gradient, [])  # I added the contribution, and W must not add it again
            return None if tracked.equal else tracked
        uses, tracked = [use], self._tracked(gradient, [use])
        if not tracked.equal and any(other.partial for key, other in own.items() if key != use):
            uses, tracked = list(own), self._tracked(gradient, list(own))
            if not tracked.equal:
                return None
        return self._settle(gradient, uses, tracked)

    def open_gradients(
        self, keys: Iterable[GradientKey]
    ) -> Iterator[tuple[GradientKey, ParameterUse, TrackedGradient]]:
        """Yield each of `keys` with `open` contributions, and expect all of these; empty `open` for it.

        The tuple is the gradient's key, the first use with such a contribution, and the tracked gradient.
        """
        for gradient in keys:
            if self.open.get(gradient):
                tracked = self._tracked(gradient, self.open[gradient])
                yield gradient, next(iter(self.open.pop(gradient))), tracked

    def reset(self, keys: Iterable[GradientKey]) -> None:
        """Expect zero gradients, since they were reduced; keep contributions that `W` may still add."""
        for gradient in keys:
            self.settled.pop(gradient, None)

    def accept(self, gradient: GradientKey, *, exactly: bool = False) -> None:
        """Expect the actual gradient from now on; `exactly`: without a tolerance."""
        tracked = self._tracked(gradient, [])
        tolerance = Tolerance(tracked.tolerance.size, 0.0) if exactly else tracked.tolerance
        self.settled[gradient] = tracked.actual.detach().clone(), tolerance

    def is_partial(self, gradient: GradientKey) -> bool:
        """Return whether an input backward (`I`) has added only a part of its contribution so far."""
        return any(use.partial for use in self.open.get(gradient, {}).values())

    def allowed(self, name: str) -> float:
        """Return the sum of the tolerances of a parameter's gradients on each of this rank's stages."""
        return sum(tolerance.allowed for (own, _), (_, tolerance) in self.settled.items() if own == name)

    def _tracked(self, gradient: GradientKey, uses: Iterable[ParameterUse]) -> TrackedGradient:
        actual = self.total(self.gradients[gradient])
        before = self.settled.get(gradient)
        total, (size, allowed) = before or (actual.new_zeros(()).expand_as(actual), NO_TOLERANCE)
        for use in uses:
            value, tolerance = self.open[gradient][use].value, self.open[gradient][use].tolerance
            total = total + value
            size = max(size, tolerance.size, largest_magnitude(total))
            allowed += tolerance.allowed + self.epsilon * size
        return TrackedGradient(actual, total, Tolerance(size, allowed))

    def _settle(
        self, gradient: GradientKey, uses: Iterable[ParameterUse], tracked: TrackedGradient
    ) -> TrackedGradient:
        self.settled[gradient] = tracked.expected, tracked.tolerance
        for use in uses:
            del self.open[gradient][use]
        return tracked
