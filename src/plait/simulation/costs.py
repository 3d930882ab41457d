"""What an action costs: time for each kind of work, and for a hop from one rank to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isfinite, lcm
from numbers import Real
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule

Cost = float | Sequence[float]
"""A number: for all that a rank holds of the model, per micro-batch. A sequence: for each stage as it is."""


class Ticks(NamedTuple):
    """Costs as whole numbers of the longest time that divides all of them, so that sums are exact."""

    tick: Fraction
    forward: tuple[int, ...]
    """per stage, as the two below"""
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    comm: int

    def duration(self, action: Action) -> int:
        """How long `action` runs."""
        kind, stage = action.kind, action.stage
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.B:
            return self.inputs[stage] + self.weights[stage]
        return self.inputs[stage] if kind is Kind.I else self.weights[stage]


@dataclass(frozen=True)
class Costs:
    """Time of a forward `F`, an input gradient `I`, a weight gradient `W`, and of a hop `comm`; any unit.

    A number is the time of one rank and micro-batch: with several chunks a rank, the action of a chunk costs
    that part of it. A sequence holds absolute times, one per stage. A full backward `B` costs `I + W`.
    `comm` is charged for each hop between different ranks and blocks neither of them.
    ScheduleError for what is negative, not finite or no number.
    """

    F: Cost = 1
    I: Cost = 1  # noqa: E741 (the field's letter)
    W: Cost = 1
    comm: float = 0

    def __post_init__(self) -> None:
        for name in ("F", "I", "W"):
            cost = getattr(self, name)
            if isinstance(cost, Sequence):
                object.__setattr__(self, name, tuple(cost))
                for stage, value in enumerate(cost):
                    _require_time(f"{name}[{stage}]", value)
            else:
                _require_time(name, cost)
        _require_time("comm", self.comm)

    def ticks(self, schedule: Schedule) -> Ticks:
        """The costs of `schedule`, exactly. ScheduleError unless each sequence has one value per stage."""
        stages = [self._per_stage(name, schedule) for name in ("F", "I", "W")]
        comm = _exact(self.comm)
        times = [time for costs in stages for time in costs] + [comm]
        grid = lcm(*(time.denominator for time in times))
        tick = Fraction(gcd(*(int(time * grid) for time in times)) or 1, grid)
        forward, inputs, weights = (tuple(int(time / tick) for time in costs) for costs in stages)
        return Ticks(tick, forward, inputs, weights, int(comm / tick))

    def _per_stage(self, name: str, schedule: Schedule) -> list[Fraction]:
        cost: Cost = getattr(self, name)
        if not isinstance(cost, Sequence):
            return [_exact(cost) * schedule.ranks / schedule.stages] * schedule.stages
        if len(cost) != schedule.stages:
            raise ScheduleError(
                f"costs.{name} has {len(cost)} values, but the schedule has {schedule.stages} stages: "
                "give one value per stage, or one number."
            )
        return [_exact(value) for value in cost]


def _require_time(name: str, value: object) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ScheduleError(f"costs.{name} is {value!r}: give a finite number of at least 0.")


def _exact(value: float) -> Fraction:
    """The decimal number that `value` is written as: 0.1 is a tenth, and ten of them are exactly 1."""
    return Fraction(str(value))
