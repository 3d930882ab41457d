"""Timelines of schedules, simulated or measured, which a notebook shows as pictures; `plait.simulate`."""

from __future__ import annotations

from plait.errors import ScheduleError
from plait.pictures.quantities import with_unit
from plait.pictures.timelines.svg import draw_svg
from plait.pictures.timelines.text import title
from plait.plan.argument_checks import require_instance
from plait.schedules.costs import Costs
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import TimedSchedule, simulated


class Timeline(TimedSchedule):
    """A timed schedule that Jupyter shows as an SVG picture; its `repr` is one line with its figures."""

    def __repr__(self) -> str:
        makespan = with_unit(self.makespan, self.unit)
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
    costs = Costs() if costs is None else costs
    require_instance("costs", costs, Costs, "give plait.Costs(F=…, I=…, W=…, comm=…), or None", ScheduleError)
    timed = simulated(schedule, costs)
    return Timeline(timed.schedule, timed.tick, timed.cells, timed.memory_costs, timed.hop)
