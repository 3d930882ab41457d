"""When every action of a schedule starts and ends, and what follows: makespan, bubble, idle time, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action
from plait.schedules.holding import Holds, peaks
from plait.schedules.play import play
from plait.schedules.schedule import Schedule
from plait.schedules.simulation.costs import Costs


class Event(NamedTuple):
    """An action and when it runs, in the unit of the costs."""

    action: Action
    start: float
    end: float


class Cell(NamedTuple):
    """An action and when it runs, in ticks."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. Cells stand on a grid of whole ticks, so nothing below is rounded twice.

    Times are in the unit of the costs, memory in activations of one rank's micro-batch.
    """

    schedule: Schedule
    tick: Fraction
    cells: tuple[tuple[Cell, ...], ...]
    holds: Holds
    hop: int
    """How long a result is on its way to another rank, in ticks; 0 where there is no other."""
    unit: str = ""
    """The unit of times, as it is written behind them: `ms` of what was measured, none of a simulation."""

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Per rank: each action with its start and end, in order."""
        return tuple(
            tuple(Event(action, self.time(start), self.time(end)) for action, start, end in row)
            for row in self.cells
        )

    @property
    def makespan(self) -> float:
        """Last end − first start, over all ranks."""
        return self.time(self.length)

    @property
    def span(self) -> float:
        """Last end − first start of the rank for which that is longest."""
        return self.time(self.longest)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing runs: `1 − busy / (ranks · makespan)`."""
        return _part_left(sum(self._busy), len(self.cells) * self.length)

    @property
    def bubble_span(self) -> float:
        """The zero-bubble papers' measure: `1 − work / span`, work = the most loaded rank's."""
        return _part_left(max(self._busy), self.longest)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank: the part of the makespan in which nothing runs."""
        return tuple(self.time(self.length - busy) for busy in self._busy)

    @property
    def idle_span(self) -> tuple[float, ...]:
        """Per rank: the part of its own span, from its first start to its last end, in which nothing runs."""
        return tuple(self.time(span - busy) for span, busy in zip(self._spans, self._busy, strict=True))

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Per rank: the most that is held at once, each micro-batch from the start of F to the end of W or B.

        In units of one rank's micro-batch: with several chunks a rank, a chunk counts as that part of one.
        """
        return tuple(map(float, peaks(self.schedule, self.holds)))

    @cached_property
    def length(self) -> int:
        """The makespan in ticks."""
        rows = [row for row in self.cells if row]
        return max((row[-1].end for row in rows), default=0) - self.first

    @property
    def longest(self) -> int:
        """The span in ticks."""
        return max(self._spans)

    @cached_property
    def first(self) -> int:
        """The tick at which the first action starts."""
        return min((row[0].start for row in self.cells if row), default=0)

    def time(self, ticks: int) -> float:
        """So many ticks in the unit of the costs."""
        return ticks * self.tick.numerator / self.tick.denominator

    @cached_property
    def _spans(self) -> tuple[int, ...]:
        return tuple(row[-1].end - row[0].start if row else 0 for row in self.cells)

    @cached_property
    def _busy(self) -> tuple[int, ...]:
        return tuple(sum(end - start for _, start, end in row) for row in self.cells)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run `schedule` in time: each rank does its actions in order, each as soon as what it needs is there.

    A forward needs the stage before, a backward its own forward and the stage behind, `W` its `I`; a result
    arrives on another rank `costs.comm` after the end of its action, and a `B` hands its gradient on at its
    end. Linear in the number of actions. ScheduleError when ranks wait for each other for ever, and for a
    stage that is not there.
    """
    _require_stages(schedule)
    costs = costs or Costs()
    ticks = costs.ticks(schedule)
    pace = ticks.pace(schedule.rank_of)
    ends, missing = play(schedule.actions, pace)
    if missing:
        raise ScheduleError(_stuck(missing, ends, schedule))
    durations = ticks.durations
    cells = tuple(
        tuple(
            Cell(action, end - durations[action.kind][action.stage], end)
            for action, end in zip(*row, strict=True)
        )
        for row in zip(schedule.actions, ends, strict=True)
    )
    return Timeline(schedule, ticks.tick, cells, costs.holds(schedule), max(pace.forward_hops))


def _require_stages(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"rank {rank} does {action}, but rank_of names stages 0 to {schedule.stages - 1} only: "
                    "change the action, or add its stage to rank_of."
                )


def _stuck(missing: Mapping[int, Action], ends: Sequence[Sequence[int]], schedule: Schedule) -> str:
    """Say where it stuck: the first rank, what it wants to do and what never comes."""
    rank = min(missing)
    action = schedule.actions[rank][len(ends[rank])]
    others = f", as {len(missing) - 1} more wait" if len(missing) > 1 else ""
    return (
        f"the schedule is stuck: rank {rank} waits at {action} for {missing[rank]}, which never comes"
        f"{others}; change the order of the actions, plait.check names the rule."
    )


def _part_left(used: int, whole: int) -> float:
    return (whole - used) / whole if whole else 0.0
