"""Joining `I` and `W` to one `B` where that costs nothing: a full backward is simpler to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.timeline import Cell, Timeline, simulate


def fused(schedule: Schedule, costs: Costs) -> Schedule:
    """The same schedule in the same time, with a `B` for each `I` whose `W` follows at once and nobody minds.

    A `B` hands its gradient on at its end, so whoever waits for it must not be due before that gets there.
    """
    timeline = simulate(schedule, costs)
    due = {cell.action: cell.start for row in timeline.cells for cell in row}
    rows: list[tuple[Action, ...]] = []
    for row in timeline.cells:
        actions: list[Action] = []
        for cell in row:
            before = actions[-1] if actions else None
            joined = _joined(before, cell, timeline, due)
            if joined is not None:
                actions[-1] = joined
            else:
                actions.append(cell.action)
        rows.append(tuple(actions))
    return replace(schedule, actions=tuple(rows))


def _joined(
    before: Action | None, cell: Cell, timeline: Timeline, due: Mapping[Action, int]
) -> Action | None:
    """The `B` that `before` and the action of `cell` make, if they may be one."""
    stage, kind, microbatch = cell.action
    if kind is not Kind.W or before != (stage, Kind.I, microbatch):
        return None
    schedule = timeline.schedule
    consumer = cell.action._replace(kind=Kind.I).consumer(schedule.stages)
    if consumer is not None:
        hop = timeline.hop if schedule.rank_of[consumer.stage] != schedule.rank_of[stage] else 0
        if due[consumer] < cell.end + hop:
            return None
    return Action(stage, Kind.B, microbatch)
