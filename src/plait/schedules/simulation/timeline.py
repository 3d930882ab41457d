"""Timelines of schedules, simulated or measured, which a notebook shows as pictures; the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.arguments import require_instance
from plait.errors import ScheduleError
from plait.schedules.action import Action
from plait.schedules.event_simulation import simulate_events
from plait.schedules.schedule import Schedule
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.svg import draw_svg
from plait.schedules.simulation.terminal import amount, title
from plait.schedules.simulation.timed_schedule import Cell, TimedSchedule


class Timeline(TimedSchedule):
    """A timed schedule that Jupyter shows as an SVG picture; its `repr` is one line with its figures."""

    def __repr__(self) -> str:
        makespan = amount(self, self.makespan)
        return f"Timeline({title(self.schedule)}; makespan {makespan}, bubble {self.bubble:.1%})"

    def _repr_svg_(self) -> str:
        """Return the picture; Jupyter calls this by its name to show the value of a cell."""
        return draw_svg(self)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return the timeline of `schedule`: each rank runs its actions in order, as early as possible.

    A forward needs the previous stage's, a backward its own forward and the next stage's backward, `W` its
    `I`. A result arrives on another rank `costs.comm` after the end of its action, the gradient of a `B` too.
    Linear in the number of actions. Raises ScheduleError for a deadlock and for a stage outside `rank_of`.
    """
    require_instance("the schedule", schedule, Schedule, "give one of plait.schedule(…)", ScheduleError)
    _require_stages(schedule)
    costs = Costs() if costs is None else costs
    require_instance("costs", costs, Costs, "give plait.Costs(F=…, I=…, W=…, comm=…), or None", ScheduleError)
    ticks = costs.ticks(schedule.ranks, schedule.stages)
    timing = ticks.timing(schedule.rank_of)
    ends, missing = simulate_events(schedule.actions, timing)
    if missing:
        raise _deadlock(missing, ends, schedule)
    durations = ticks.durations
    cells = tuple(
        tuple(
            Cell(action, end - durations[action.kind][action.stage], end)
            for action, end in zip(*row, strict=True)
        )
        for row in zip(schedule.actions, ends, strict=True)
    )
    memory_costs = costs.memory(schedule.ranks, schedule.stages)
    return Timeline(schedule, ticks.tick, cells, memory_costs, max(timing.forward_hops))


def _require_stages(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but rank_of names stages 0 to {schedule.stages - 1} only: "
                    "change the action, or add its stage to rank_of."
                )


def _deadlock(
    missing: Mapping[int, Action], ends: Sequence[Sequence[int]], schedule: Schedule
) -> ScheduleError:
    rank = min(missing)
    action = schedule.actions[rank][len(ends[rank])]
    others = f", and {len(missing) - 1} more wait" if len(missing) > 1 else ""
    return ScheduleError(
        f"the schedule has a deadlock: rank {rank} waits at {action} for {missing[rank]}, which never runs"
        f"{others}; change the order of the actions, plait.check names the rule."
    )
