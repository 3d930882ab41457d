"""A timed schedule: start and end of every action, with makespan, bubble, idle time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs, MemoryCosts, memory_use, peak_memory
from plait.schedules.schedule import Schedule


class Event(NamedTuple):
    """An action with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float


class Cell(NamedTuple):
    """An action with its start and end, in ticks (integer units of time)."""

    action: Action
    start: int
    end: int


class MemoryPoint(NamedTuple):
    """A rank's activation memory, in units of `MemoryCosts`, from `tick` until the next point."""

    tick: int
    held: int


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule with the start and end time of each action; pictures and figures are made from it.

    Cells are in integer ticks, so that results are rounded once. The first action starts at tick 0.
    Times are in the unit of the costs, memory in activations of one rank's micro-batch.
    """

    schedule: Schedule
    tick: Fraction
    cells: tuple[tuple[Cell, ...], ...]
    memory_costs: MemoryCosts
    hop: int
    """Duration of a message between ranks, in ticks; 0 with a single rank."""
    unit: str = ""
    """Suffix of times in pictures: `ms` where they were measured, empty in a simulation."""

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """The actions of each rank with their start and end, in order."""
        return tuple(
            tuple(Event(action, self.time(start), self.time(end)) for action, start, end in row)
            for row in self.cells
        )

    @property
    def makespan(self) -> float:
        """Time from the first start of any action to the last end, over all ranks."""
        return self.time(self.length)

    @property
    def span(self) -> float:
        """The longest time that a single rank takes from its first start to its last end."""
        return self.time(self.longest)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time: `1 − busy / (ranks · makespan)`."""
        return _idle_part(sum(self._busy), len(self.cells) * self.length)

    @property
    def bubble_span(self) -> float:
        """Idle fraction as the zero-bubble papers measure it: `1 − largest busy time / longest span`."""
        return _idle_part(max(self._busy), self.longest)

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each rank within the makespan."""
        return tuple(self.time(self.length - busy) for busy in self._busy)

    @property
    def idle_span(self) -> tuple[float, ...]:
        """Idle time of each rank within its own span, from its first start to its last end."""
        return tuple(self.time(span - busy) for span, busy in zip(self._spans, self._busy, strict=True))

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The peak of each rank's activation memory, in micro-batches.

        Each from the start of F to the end of W or B. In units of one rank's micro-batch: with several chunks
        per rank, a chunk counts as its part of one.
        """
        return tuple(map(float, peak_memory(self.schedule, self.memory_costs)))

    @cached_property
    def memory_curve(self) -> tuple[tuple[MemoryPoint, ...], ...]:
        """Points at which the memory of each rank changes, in order; before the first point it is 0.

        A forward counts from its start. A full backward counts from start to end with its peak. Two points
        have the same tick where memory is held for no time at all: first the peak, then what stays. So the
        highest point of a rank is exactly its `peak`.
        """
        return tuple(tuple(_memory_points(row, self.memory_costs)) for row in self.cells)

    @cached_property
    def length(self) -> int:
        """The makespan in ticks, as an exact integer."""
        rows = [row for row in self.cells if row]
        return max((row[-1].end for row in rows), default=0)

    @property
    def longest(self) -> int:
        """The span in ticks: the longest time a rank takes from its first start to its last end."""
        return max(self._spans)

    def time(self, ticks: int) -> float:
        """Return a number of ticks as a time in the unit of the costs."""
        return ticks * self.tick.numerator / self.tick.denominator

    def as_json(self) -> dict[str, object]:
        """Return figures and order of actions as a dictionary that `plait schedule --json` prints."""
        made = self.schedule
        return {
            "policy": made.policy,
            "ranks": made.ranks,
            "chunks": made.stages // made.ranks,
            "microbatches": made.microbatches,
            "makespan": self.makespan,
            "span": self.span,
            "bubble": self.bubble,
            "bubble_span": self.bubble_span,
            "peak": self.peak,
            "order": made.order,
            "rank_of": made.rank_of,
            **({} if made.bound is None else {"bound": made.bound}),
        }

    @cached_property
    def _spans(self) -> tuple[int, ...]:
        return tuple(row[-1].end - row[0].start if row else 0 for row in self.cells)

    @cached_property
    def _busy(self) -> tuple[int, ...]:
        return tuple(sum(end - start for _, start, end in row) for row in self.cells)


def _idle_part(used: int, whole: int) -> float:
    return (whole - used) / whole if whole else 0.0


def _memory_points(row: Sequence[Cell], costs: MemoryCosts) -> Iterator[MemoryPoint]:
    level = 0
    for tick, amounts in groupby(_memory_changes(row, costs), key=itemgetter(0)):
        units = [amount for _, amount in amounts]
        if max(units) > level:
            level = max(units)
            yield MemoryPoint(tick, level)
        if units[-1] != level:
            level = units[-1]
            yield MemoryPoint(tick, level)


def _memory_changes(row: Sequence[Cell], costs: MemoryCosts) -> Iterator[tuple[int, int]]:
    use = memory_use([cell.action for cell in row], costs)
    for (action, start, end), (most, after) in zip(row, use, strict=True):
        if action.kind in (Kind.F, Kind.B):
            yield start, most
        yield end, after


def simulated(schedule: Schedule, costs: Costs) -> TimedSchedule:
    """Return `schedule` with the times of its actions: each rank runs its own in order, as early as possible.

    See `plait.simulate`. Raises ScheduleError for a deadlock and for a stage outside `rank_of`.
    """
    _require_stages(schedule)
    ticks = costs.ticks(schedule.ranks, schedule.stages)
    timing = ticks.timing(schedule.rank_of)
    durations = ticks.durations
    cells = tuple(
        tuple(
            Cell(action, end - durations[action.kind][action.stage], end)
            for action, end in zip(*row, strict=True)
        )
        for row in zip(schedule.actions, schedule.event_order.ends(timing), strict=True)
    )
    memory_costs = costs.memory(schedule.ranks, schedule.stages)
    return TimedSchedule(schedule, ticks.tick, cells, memory_costs, max(timing.forward_hops))


def _require_stages(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but rank_of names stages 0 to {schedule.stages - 1} only: "
                    "change the action, or add its stage to rank_of."
                )
