"""The calls of routers within a layer: which experts each token was sent to, and how clearly.

A perturbed run of the reference takes the experts that the run without perturbation has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class RouterCall:
    """One call of a router; letters: T tokens, E experts, k experts of a token."""

    weight: Tensor
    """The router's, by which it is known."""
    logits: Tensor
    """`[T, E]`."""
    indices: Tensor
    """int64 `[T, k]`: the experts of each token, in the order of their scores; -1 for padding."""
    margins: Tensor
    """`[T]`: how far the scores of a token can change before other experts are chosen; infinite if never."""


@dataclass
class RoutingCalls:
    """Records the experts that routers choose in one run of a layer, or makes them take given ones."""

    calls: list[RouterCall] = field(default_factory=list)
    given: Sequence[Tensor] = ()
    """The experts that calls take in place of those they choose, in the order of the calls."""

    def begin(self, given: Sequence[Tensor] = ()) -> None:
        """Clear the recorded calls; later calls of routers return the tensors `given`, one after another."""
        self.calls, self.given = [], given

    def note(self, weight: Tensor, logits: Tensor, indices: Tensor, margins: Tensor) -> Tensor:
        """Record the choice of the router with `weight`; return it, or the experts given for this call."""
        number = len(self.calls)
        if number < len(self.given):
            indices = self.given[number].reshape(indices.shape)
        self.calls.append(RouterCall(weight, logits, indices, margins))
        return indices
