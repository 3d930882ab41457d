"""What really happened, in the form of what is simulated: a timeline of measured times, and costs from it.

Times are milliseconds; a tick is a nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median
from typing import NamedTuple, TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.timeline import Cell, Timeline

TICK = Fraction(1, 1_000_000)


class MeasuredAction(NamedTuple):
    """An action as one rank did it. Times are nanoseconds of a clock that all ranks share."""

    action: Action
    start: int
    end: int
    asked: int | None = None
    """Since when the rank waited for what the action needs from another rank; None: it needs nothing."""


Rows: TypeAlias = Sequence[Sequence[MeasuredAction]]
"""Per rank of `pp`, what it did, in order."""


def measured_timeline(schedule: Schedule, rows: Rows) -> Timeline:
    """`rows` as a timeline whose first action starts at 0, of the schedule that was really run.

    In it the actions stand as they were done: a `B` of `schedule` that sends its result early as `I` and `W`.
    Its `hop` is the shortest time in which a result arrived. Memory is counted as in a simulation.
    """
    first = min((row[0].start for row in rows if row), default=0)
    actions = tuple(tuple(done.action for done in row) for row in rows)
    ran = replace(schedule, actions=actions, bound=None)
    cells = tuple(
        tuple(Cell(done.action, done.start - first, done.end - first) for done in row) for row in rows
    )
    hops = [consumer.start - producer.end for producer, consumer in _messages(ran, rows)]
    return Timeline(
        ran, TICK, cells, Costs().memory(ran.ranks, ran.stages), max(0, min(hops, default=0)), unit="ms"
    )


def measured_costs(schedule: Schedule, rows: Rows) -> Costs:
    """What an action of each stage took, as medians over micro-batches, and a hop between ranks.

    Of a stage that did `I` and `W` at once, each is half of that. A hop counts where the rank waited when the
    result was made; `comm` is the median, 0 where no rank ever waited. Memory is not measured.
    """
    durations: dict[tuple[int, Kind], list[int]] = {}
    for done in (done for row in rows for done in row):
        durations.setdefault((done.action.stage, done.action.kind), []).append(done.end - done.start)

    def cost(stage: int, kind: Kind) -> float:
        alone, both = durations.get((stage, kind)), durations.get((stage, Kind.B))
        if alone is None and (both is None or kind is Kind.F):
            raise ScheduleError(f"no {kind} of stage {stage} was measured: record a whole training step.")
        return _milliseconds(median(alone)) if alone else _milliseconds(median(both or ())) / 2

    stages = range(schedule.stages)
    hops = [
        max(0, consumer.start - producer.end)
        for producer, consumer in _messages(schedule, rows)
        if consumer.asked is not None and consumer.asked < producer.end
    ]
    forward, inputs, weights = ([cost(stage, kind) for stage in stages] for kind in (Kind.F, Kind.I, Kind.W))
    return Costs(F=forward, I=inputs, W=weights, comm=_milliseconds(median(hops)) if hops else 0)


def measured_waits(rows: Rows) -> tuple[float, ...]:
    """Per rank: how long it waited for results of others."""
    return tuple(
        _milliseconds(sum(done.start - done.asked for done in row if done.asked is not None)) for row in rows
    )


def _messages(schedule: Schedule, rows: Rows) -> Iterator[tuple[MeasuredAction, MeasuredAction]]:
    """What made a result and what took it, of those on different ranks."""
    takers = {done.action.message_key: done for row in rows for done in row}
    for producer in (done for row in rows for done in row):
        consumer = producer.action.consumer(schedule.stages)
        if consumer is None or schedule.rank_of[consumer.stage] == schedule.rank_of[producer.action.stage]:
            continue
        if consumer in takers:
            yield producer, takers[consumer]


def _milliseconds(nanoseconds: float) -> float:
    return nanoseconds / 1_000_000
