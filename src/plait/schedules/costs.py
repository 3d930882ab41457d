"""Costs of a micro-batch, times and memory; the activation memory that the ranks of a schedule hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, inf, lcm
from numbers import Real
from operator import add
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import Timing
from plait.schedules.schedule import Schedule

UNLIMITED = 1 << 4096
"""More units than any schedule needs."""
TOLERANCE = Fraction(1, 10**9)
"""Relative amount by which a limit may be exceeded: the rounding of floats, no more."""


class MemoryCosts(NamedTuple):
    """Activation memory of one micro-batch on each stage, as integers, in multiples of `unit`.

    1 is the memory of a micro-batch on all stages of a rank.
    """

    unit: Fraction
    until_input: tuple[int, ...]
    """From the start of the forward to the end of the input gradient."""
    until_weight: tuple[int, ...]
    """From the end of the input gradient to the end of the weight gradient."""


def memory_use(actions: Sequence[Action], costs: MemoryCosts) -> Iterator[tuple[int, int]]:
    """Yield the peak memory during each action of a rank and the memory after it, in units of `costs`."""
    use = 0
    for stage, kind, _ in actions:
        if kind is Kind.F:
            use += costs.until_input[stage]
            yield use, use
            continue
        before = use
        if kind is not Kind.W:
            use += costs.until_weight[stage] - costs.until_input[stage]
        most = max(before, use)
        if kind is not Kind.I:
            use -= costs.until_weight[stage]
        yield most, use


def peak_memory(schedule: Schedule, costs: MemoryCosts | None = None) -> tuple[Fraction, ...]:
    """Return each rank's peak activation memory; 1 is one micro-batch on all stages of a rank."""
    costs = costs or Costs().memory(schedule.ranks, schedule.stages)
    return tuple(
        costs.unit * max((most for most, _ in memory_use(actions, costs)), default=0)
        for actions in schedule.actions
    )


def is_within(schedule: Schedule, limit: float, costs: MemoryCosts) -> bool:
    """Return whether each rank's peak activation memory is at most `limit`.

    1 is one micro-batch on all stages of a rank, as in `peak_memory`.
    """
    return max(peak_memory(schedule, costs)) <= limit_in_units(limit, costs.unit) * costs.unit


def limit_in_units(limit: float, unit: Fraction) -> int:
    """Return the memory `limit` in multiples of `unit`, rounded down.

    A very large number for infinity. Raises ScheduleError for a negative limit, NaN, and what is no number.
    """
    number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not number or limit != limit or limit < 0:
        raise ScheduleError(f"limit is {limit}: give the most that a rank may hold, in micro-batches.")
    return UNLIMITED if limit == inf else int(Fraction(str(limit)) * (1 + TOLERANCE) / unit)


SMALLEST, LARGEST = 1e-200, 1e60
"""Range of costs; others would only overflow."""
Cost = float | Sequence[float]
"""A number: for all stages of a rank together, per micro-batch. A sequence: one absolute cost per stage."""


class Ticks(NamedTuple):
    """Durations of actions and messages, as integer multiples of `tick`, so that sums are exact."""

    tick: Fraction
    durations: Mapping[Kind, tuple[int, ...]]
    """Duration of an action of each kind, per stage."""
    comm: int

    def timing(self, rank_of: Sequence[int]) -> Timing:
        """Return the durations for simulations, where messages within one rank take no time."""
        hops = [0 if here == there else self.comm for here, there in pairwise(rank_of)]
        return Timing(self.durations, [0, *hops], [*hops, 0])


@dataclass(frozen=True)
class Costs:
    """Costs of the stages for one micro-batch: times in any unit, and activation memory.

    `F`, `I`, `W`: a forward, an input gradient, a weight gradient. A full backward `B` costs `I + W`.
    `comm`: a message between different ranks; it blocks neither of them. `until_I`, `until_W`: memory from
    the start of the forward to the end of the input gradient, and from there to the end of the weight
    gradient.

    A number is the cost per rank and micro-batch: with several chunks per rank, a chunk costs its part of it.
    A sequence has absolute costs, one per stage. Raises ScheduleError for a cost that is negative, not finite
    or not a number.
    """

    F: Cost = 1
    I: Cost = 1  # noqa: E741 (the field's letter)
    W: Cost = 1
    comm: float = 0
    until_I: Cost = 1  # noqa: N815 (the field's letter)
    until_W: Cost = 1  # noqa: N815

    def __post_init__(self) -> None:
        for name in ("F", "I", "W", "until_I", "until_W"):
            cost = getattr(self, name)
            if isinstance(cost, Sequence) and not isinstance(cost, str | bytes):
                object.__setattr__(self, name, tuple(cost))
                for stage, value in enumerate(cost):
                    _require_time(f"{name}[{stage}]", value)
            else:
                _require_time(name, cost)
        _require_time("comm", self.comm)

    def ticks(self, ranks: int, stages: int) -> Ticks:
        """Return durations per stage in integer ticks. Raises ScheduleError for a wrong number of costs."""
        names = ("F", "I", "W")
        tick, (*times, (comm,)) = _whole(
            *(self._per_stage(name, ranks, stages) for name in names), [_exact(self.comm)]
        )
        forward, inputs, weights = times
        both = tuple(map(add, inputs, weights))
        return Ticks(tick, {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both}, comm)

    def memory(self, ranks: int, stages: int) -> MemoryCosts:
        """Return the exact activation memory of one micro-batch on each stage.

        Raises ScheduleError for a sequence of costs that does not have one value per stage.
        """
        unit, (until_input, until_weight) = _whole(
            *(self._per_stage(name, ranks, stages) for name in ("until_I", "until_W"))
        )
        return MemoryCosts(unit, until_input, until_weight)

    def _per_stage(self, name: str, ranks: int, stages: int) -> list[Fraction]:
        cost: Cost = getattr(self, name)
        if not isinstance(cost, Sequence):
            return [_exact(cost) * ranks / stages] * stages
        if len(cost) != stages:
            raise ScheduleError(
                f"costs.{name} has {len(cost)} values, but the schedule has {stages} stages: "
                "give one value per stage, or one number."
            )
        return [_exact(value) for value in cost]


def _whole(*rows: Sequence[Fraction]) -> tuple[Fraction, list[tuple[int, ...]]]:
    """Return the largest unit of which all numbers are integer multiples, and these multiples."""
    numbers = [number for row in rows for number in row]
    grid = lcm(*(number.denominator for number in numbers))
    unit = Fraction(gcd(*(int(number * grid) for number in numbers)) or 1, grid)
    return unit, [tuple(int(number / unit) for number in row) for row in rows]


def _require_time(name: str, value: object) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= value < inf:  # type: ignore[operator]
        raise ScheduleError(f"costs.{name} is {value!r}: give a finite number of at least 0.")
    if value and not SMALLEST <= value <= LARGEST:  # type: ignore[operator]
        raise ScheduleError(
            f"costs.{name} is {value!r}: choose a unit in which it is from {SMALLEST:g} to {LARGEST:g}."
        )


def _exact(value: float) -> Fraction:
    """Return the exact fraction of the decimal notation of `value`: ten times 0.1 is exactly 1."""
    return Fraction(str(value))
