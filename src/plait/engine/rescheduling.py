"""Measured times as a timeline and as costs; a shorter order of the same actions for these costs.

Measured times are milliseconds; a tick is a nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import Timeline
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import broadcast_result
from plait.schedules.action import Action, Kind
from plait.schedules.check import check
from plait.schedules.costs import Costs, is_within
from plait.schedules.lowering.messages import sends_and_receives
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import AUTO, schedule
from plait.schedules.timed_schedule import Cell, simulated

TICK = Fraction(1, 1_000_000)


class MeasuredAction(NamedTuple):
    """A measured action of one rank. Times are nanoseconds of a clock common to all ranks."""

    action: Action
    start: int
    end: int
    wait_start: int | None = None
    """Start of the wait for the action's message; None: its input is not from another rank."""


MeasuredRows: TypeAlias = Sequence[Sequence[MeasuredAction]]
"""Per rank of `pp`, its measured actions, in order."""


def measured_timeline(schedule: Schedule, rows: MeasuredRows) -> Timeline:
    """Return the measured actions of all ranks, `rows`, as a timeline that starts at 0.

    Its schedule has the actions that were run: a `B` of `schedule` that sends early is `I` and `W`.
    Its `hop` is the shortest time in which a message arrived. Memory is counted as in a simulation.
    """
    first = min((row[0].start for row in rows if row), default=0)
    actions = tuple(tuple(done.action for done in row) for row in rows)
    ran = replace(schedule, actions=actions, bound=None)
    cells = tuple(
        tuple(Cell(done.action, done.start - first, done.end - first) for done in row) for row in rows
    )
    hops = [consumer.start - producer.end for producer, consumer in sends_and_receives(rows, ran)]
    return Timeline(
        ran, TICK, cells, Costs().memory(ran.ranks, ran.stages), max(0, min(hops, default=0)), unit="ms"
    )


def measured_costs(schedule: Schedule, rows: MeasuredRows) -> Costs:
    """Return the median times of each stage's actions over micro-batches, and of a message between ranks.

    On a stage that ran `B`, `I` and `W` are half of it each. A message counts where its receiver was waiting
    when it was sent; `comm` is the median, 0 where no rank ever waited. Memory is not measured.
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
        for producer, consumer in sends_and_receives(rows, schedule)
        if consumer.wait_start is not None and consumer.wait_start < producer.end
    ]
    forward, inputs, weights = ([cost(stage, kind) for stage in stages] for kind in (Kind.F, Kind.I, Kind.W))
    return Costs(F=forward, I=inputs, W=weights, comm=_milliseconds(median(hops)) if hops else 0)


def measured_waits(rows: MeasuredRows) -> tuple[float, ...]:
    """Return the time that each rank waited for messages, in milliseconds."""
    return tuple(
        _milliseconds(sum(done.start - done.wait_start for done in row if done.wait_start is not None))
        for row in rows
    )


def _milliseconds(nanoseconds: float) -> float:
    return nanoseconds / 1_000_000


def shortest_schedule(now: Schedule, costs: Costs, limit: float | None) -> Schedule:
    """Return a schedule shorter than `now` at these `costs`, with the same stages on each rank, else `now`.

    `limit` is that of `plait.schedule`; `now` is not returned if it exceeds it. Raises ScheduleError where no
    schedule is within it.
    """
    found = schedule(
        AUTO, ranks=now.ranks, microbatches=now.microbatches, costs=costs, limit=limit, rank_of=now.rank_of
    )
    fits = limit is None or is_within(now, limit, costs.memory(now.ranks, now.stages))
    # As the executor runs them: a `B` whose gradient is sent is an `I` and then a `W`.
    before, after = (simulated(one.split_backward, costs).makespan for one in (now, found))
    return now if fits and before <= after else found


def schedule_from_rank_zero(now: Schedule, choose: Callable[[], Schedule], mesh: Mesh) -> Schedule:
    """Return rank 0's result of `choose` on every rank. Raises ScheduleError on all if `choose` fails.

    Communication: two broadcasts over `world`, of 8 bytes and of the order as text.
    """
    world = mesh.group("world")
    text = broadcast_result(lambda: json.dumps(to_json(choose())), ScheduleError, world, mesh.device)
    return from_json(json.loads(text), now) or now


def to_json(order: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON values: policy, actions of each rank, micro-batches, rank of each stage."""
    lines = [order.policy, *(" ".join(row) for row in order.order)]
    return {"microbatches": order.microbatches, "rank_of": list(order.rank_of), "order": "\n".join(lines)}


def from_json(state: Mapping[str, Any], now: Schedule) -> Schedule | None:
    """Return the schedule that `to_json` wrote; None if it equals `now` or is for another pipeline.

    Another pipeline has another number of micro-batches, or a stage on another rank.
    """
    if (state["microbatches"], tuple(state["rank_of"])) != (now.microbatches, tuple(now.rank_of)):
        return None
    policy, *rows = state["order"].split("\n")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return None if actions == now.actions else replace(now, policy=policy, actions=actions, bound=None)


def require_same_actions(other: Schedule, now: Schedule) -> None:
    """Raise ScheduleError unless `other` is valid and has the micro-batches and stages of `now`."""
    for name in ("ranks", "rank_of", "microbatches"):
        expected, found = getattr(now, name), getattr(other, name)
        if expected != found:
            raise ScheduleError(
                f"the schedule's {name} is {found}, but the engine's is {expected}: stages stay where they "
                "are, so give another order of the same actions."
            )
    check(other)
