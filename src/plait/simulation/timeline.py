"""When every action of a schedule starts and ends, and what follows: makespan, bubble, idle time, memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule
from plait.simulation.costs import Costs, Ticks


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
        return self.time(max(self._spans))

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing runs: `1 − busy / (ranks · makespan)`."""
        return _part_left(sum(self._busy), len(self.cells) * self.length)

    @property
    def bubble_span(self) -> float:
        """The zero-bubble papers' measure: `1 − work / span`, work = the most loaded rank's."""
        return _part_left(max(self._busy), max(self._spans))

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
        """Per rank: most activations alive at once, each from the start of its F to the end of its W or B.

        In units of one rank's micro-batch: with several chunks a rank, a chunk counts as that part of one.
        """
        ranks, stages = self.schedule.ranks, self.schedule.stages
        return tuple(_most_alive(actions) * ranks / stages for actions in self.schedule.actions)

    @cached_property
    def length(self) -> int:
        """The makespan in ticks."""
        rows = [row for row in self.cells if row]
        return max((row[-1].end for row in rows), default=0) - self.first

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
    end. Linear in the number of actions. ScheduleError when ranks wait for each other for ever.
    """
    ticks = (costs or Costs()).ticks(schedule)
    rows: list[list[Cell]] = [[] for _ in schedule.actions]
    ended: dict[Result, int] = {}
    waiting: dict[Result, list[int]] = defaultdict(list)
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        row, actions = rows[rank], schedule.actions[rank]
        while len(row) < len(actions):
            action = actions[len(row)]
            arrival, missing = _arrival(_needs(action, schedule, ticks), ended)
            if missing:
                waiting[missing].append(rank)
                break
            start = max(arrival, row[-1].end) if row else arrival
            end = start + ticks.duration(action)
            row.append(Cell(action, start, end))
            if action.kind is not Kind.W:
                result = _result(action)
                ended[result] = end
                ready.extend(waiting.pop(result, ()))
    if waiting:
        raise ScheduleError(_stuck(waiting, schedule, rows))
    return Timeline(schedule, ticks.tick, tuple(map(tuple, rows)))


Result = tuple[int, bool, int]
"""What other actions wait for: of which stage, whether a gradient, of which micro-batch."""


def _result(action: Action) -> Result:
    return action.stage, action.kind is not Kind.F, action.microbatch


def _arrival(needs: Iterable[tuple[Result, int]], ended: Mapping[Result, int]) -> tuple[int, Result | None]:
    """When all of `needs` are there; or the first one that nobody has made yet."""
    latest = 0
    for need, delay in needs:
        end = ended.get(need)
        if end is None:
            return 0, need
        latest = max(latest, end + delay)
    return latest, None


def _needs(action: Action, schedule: Schedule, ticks: Ticks) -> Iterator[tuple[Result, int]]:
    """The results that `action` starts from, each with the time it takes to get here."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.W:
        yield (stage, True, microbatch), 0
        return
    backward = kind is not Kind.F
    if backward:
        yield (stage, False, microbatch), 0
    source = stage + 1 if backward else stage - 1
    if 0 <= source < schedule.stages:
        hop = schedule.rank_of[source] != schedule.rank_of[stage]
        yield (source, backward, microbatch), ticks.comm if hop else 0


def _stuck(waiting: dict[Result, list[int]], schedule: Schedule, rows: Sequence[Sequence[Cell]]) -> str:
    """Say where it stuck: the first rank, what it wants to do and what never comes."""
    blocked = {rank: need for need, ranks in waiting.items() for rank in ranks}
    rank = min(blocked)
    stage, backward, microbatch = blocked[rank]
    action = schedule.actions[rank][len(rows[rank])]
    missing = Action(stage, Kind.I if backward else Kind.F, microbatch)
    others = f", as {len(blocked) - 1} more wait" if len(blocked) > 1 else ""
    return (
        f"the schedule is stuck: rank {rank} waits at {action} for {missing}, which never comes{others}; "
        "change the order of the actions, plait.check names the rule."
    )


def _most_alive(actions: Sequence[Action]) -> int:
    alive = most = 0
    for action in actions:
        if action.kind is Kind.F:
            alive += 1
            most = max(most, alive)
        elif action.kind is not Kind.I:
            alive -= 1
    return most


def _part_left(used: int, whole: int) -> float:
    return (whole - used) / whole if whole else 0.0
