"""What each parameter's gradient should be at any time of a step, on one rank.

Some weight gradients are added by `I` (norms, biases: with the layer's backward), others by `W` (deferred),
a few in part by each. Which is which is seen from the numbers: after `I` a gradient holds the micro-batch's
contribution already, or is still what it was, or is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from plait.verification.recording import NOTHING, Bound, difference, peak

SumKey = tuple[str, int]
"""A parameter's name, and the first of the rank's stages that add to this gradient of it."""
Use = tuple[int, int]
"""Layer of the model, micro-batch of the global batch."""


@dataclass(frozen=True)
class Contribution:
    """What one use adds to a gradient, and by how much that may be missed."""

    value: Tensor
    bound: Bound
    begun: bool = False
    """Whether `I` has added a part of it."""


@dataclass(frozen=True)
class Due:
    """A gradient as it is and as it should be."""

    actual: Tensor
    expected: Tensor
    bound: Bound

    @property
    def holds(self) -> bool:
        """Whether it is as it should be."""
        return difference(self.actual, self.expected) <= self.bound.allowed


@dataclass
class Ledger:
    """The gradients that a rank's parameters should have, as contributions come in."""

    gradients: Mapping[SumKey, Tensor]
    """What is added to."""
    epsilon: float
    settled: dict[SumKey, tuple[Tensor, Bound]] = field(default_factory=dict)
    """What is surely in it."""
    open: dict[SumKey, dict[Use, Contribution]] = field(default_factory=dict)
    """Uses whose `I` is done and whose `W` may be to come."""

    def begin(self) -> None:
        """A step starts from zero."""
        self.settled.clear()
        self.open.clear()

    def after_input(
        self, which: SumKey, use: Use, contribution: Tensor, bound: Bound, *, whole: bool
    ) -> Due | None:
        """After `I`: the gradient, if it holds the contribution already. `whole`: `W` was done as well."""
        own = self.open.setdefault(which, {})
        own[use] = Contribution(contribution, bound)
        if whole:
            return None
        waiting, added = self._due(which, []), self._due(which, [use])
        if added.holds and not waiting.holds:
            return self._settle(which, [use], added)
        if not waiting.holds:
            own[use] = Contribution(contribution, bound, begun=True)
        return None

    def after_weight(self, which: SumKey, use: Use) -> Due | None:
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

    def left(self, sums: Iterable[SumKey]) -> Iterator[tuple[SumKey, Use, Due]]:
        """When all is done: the gradients that never were what they should be, with the first open use."""
        for which in sums:
            if self.open.get(which):
                due = self._due(which, self.open[which])
                yield which, next(iter(self.open.pop(which))), due

    def close(self, sums: Iterable[SumKey]) -> None:
        """What was added to these is given away: they start from zero again. What is open is to come."""
        for which in sums:
            self.settled.pop(which, None)

    def accept(self, which: SumKey, *, exactly: bool = False) -> None:
        """Start from a gradient that was wrong, and was reported; or from one that is `exactly` right now."""
        due = self._due(which, [])
        bound = Bound(due.bound.size, 0.0) if exactly else due.bound
        self.settled[which] = due.actual.detach().clone(), bound

    def is_begun(self, which: SumKey) -> bool:
        """Whether `I` has added a part of what is still open."""
        return any(use.begun for use in self.open.get(which, {}).values())

    def allowed(self, name: str) -> float:
        """By how much all gradients of a parameter together may be missed."""
        return sum(bound.allowed for (own, _), (_, bound) in self.settled.items() if own == name)

    def _due(self, which: SumKey, uses: Iterable[Use]) -> Due:
        actual = self.gradients[which]
        before = self.settled.get(which)
        total, (size, allowed) = before or (actual.new_zeros(()).expand_as(actual), NOTHING)
        for use in uses:
            value, bound = self.open[which][use].value, self.open[which][use].bound
            total = total + value
            size = max(size, bound.size, peak(total))
            allowed += bound.allowed + self.epsilon * size
        return Due(actual, total, Bound(size, allowed))

    def _settle(self, which: SumKey, uses: Iterable[Use], due: Due) -> Due:
        self.settled[which] = due.expected, due.bound
        for use in uses:
            del self.open[which][use]
        return due
