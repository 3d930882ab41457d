"""What the layers of a model cost, and so its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.schedules.simulation.costs import Costs

HOP, MESSAGE = 0.01, 0.0025
"""Parts of a rank's work on a micro-batch, as two ranks of one host over Gloo have been seen to take them."""


@dataclass(frozen=True)
class LayerCosts:
    """The time of each layer's forward, input gradient and weight gradient, and of messages, in one unit."""

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 (the field's letter)
    W: tuple[float, ...]
    comm: float = 0
    """A hop between ranks, which blocks neither."""
    message: float = 0
    """What a rank is busy with for each forward and input gradient, beside layers: to send and to receive."""

    @classmethod
    def evenly(cls, costs: Sequence[float]) -> LayerCosts:
        """A third of each layer's cost for each of the three: what is known when nothing was measured."""
        thirds = tuple(cost / 3 for cost in costs)
        return cls(thirds, thirds, thirds)

    def with_messages(self, ranks: int) -> LayerCosts:
        """These, and what messages are taken to cost between so many ranks: `HOP` and `MESSAGE`."""
        work = sum(self.total) / ranks
        return replace(self, comm=HOP * work, message=MESSAGE * work)

    @property
    def total(self) -> tuple[float, ...]:
        """What each layer costs in all."""
        return tuple(map(sum, zip(self.F, self.I, self.W, strict=True)))

    def of_stages(self, cut: Sequence[int]) -> Costs:
        """What the stages of a cut cost."""
        return Costs(
            F=_sums(self.F, cut, self.message),
            I=_sums(self.I, cut, self.message),
            W=_sums(self.W, cut, 0),
            comm=self.comm,
        )


def _sums(costs: Sequence[float], cut: Sequence[int], besides: float) -> list[float]:
    stops = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [besides + sum(costs[stop - count : stop]) for stop, count in zip(stops, cut, strict=True)]
