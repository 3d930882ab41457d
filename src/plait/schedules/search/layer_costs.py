"""Costs of the layers of a model, and of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.schedules.costs import Costs

HOP, MESSAGE = 0.01, 0.0025
"""Message times as parts of a rank's work on a micro-batch, measured on two ranks of a host with Gloo."""


@dataclass(frozen=True)
class LayerCosts:
    """The time of each layer's forward, input gradient and weight gradient, and of messages, in one unit."""

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 (the field's letter)
    W: tuple[float, ...]
    comm: float = 0
    """A message between ranks, which blocks neither."""
    message: float = 0
    """Time to send and receive that blocks a rank, for each forward and input gradient."""

    @classmethod
    def evenly(cls, costs: Sequence[float]) -> LayerCosts:
        """Return assumed costs, without measurements: `F`, `I` and `W` take a third of each layer's cost."""
        thirds = tuple(cost / 3 for cost in costs)
        return cls(thirds, thirds, thirds)

    def in_input_gradient(self, layer: int, cost: float) -> LayerCosts:
        """Return a copy in which `cost`, a part of a layer's total, all belongs to the layer's `I`."""
        part = min(cost, self.total[layer]) / 3
        forward, inputs, weights = list(self.F), list(self.I), list(self.W)
        forward[layer] -= part
        inputs[layer] += 2 * part
        weights[layer] -= part
        return replace(self, F=tuple(forward), I=tuple(inputs), W=tuple(weights))

    def with_messages(self, ranks: int) -> LayerCosts:
        """Return a copy whose message times are estimated as fixed fractions of a rank's mean work."""
        work = sum(self.total) / ranks
        return replace(self, comm=HOP * work, message=MESSAGE * work)

    @property
    def total(self) -> tuple[float, ...]:
        """Cost of each layer, `F + I + W`."""
        return tuple(map(sum, zip(self.F, self.I, self.W, strict=True)))

    def of_stages(self, cut: Sequence[int]) -> Costs:
        """Return the costs of stages; `cut` has the number of layers of each."""
        return Costs(
            F=_sums(self.F, cut, self.message),
            I=_sums(self.I, cut, self.message),
            W=_sums(self.W, cut, 0),
            comm=self.comm,
        )


def _sums(costs: Sequence[float], cut: Sequence[int], extra: float) -> list[float]:
    stops = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [extra + sum(costs[stop - count : stop]) for stop, count in zip(stops, cut, strict=True)]
