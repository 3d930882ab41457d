"""The table of `plait schedule --compare`.

policy              chunks  makespan  span  bubble  of span  peak  × best
1f1b                     1        33    33   27.3%    27.3%     4    1.29
auto (v, 2 chunks)       2      25.5  25.5    5.9%     5.9%     4    1.00
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.errors import ScheduleError
from plait.schedules.simulation.timeline import Timeline

_HEAD = ("policy", "chunks", "makespan", "span", "bubble", "of span", "peak", "× best")


def comparison(results: Mapping[str, Timeline | ScheduleError], measure: str) -> str:
    """A line for each schedule, `× best` by `measure`; then why the others could not be made, and bounds."""
    made = {name: result for name, result in results.items() if isinstance(result, Timeline)}
    best = min(getattr(timeline, measure) for timeline in made.values())
    lines = _aligned([_HEAD, *(_row(timeline, measure, best) for timeline in made.values())])
    notes = []
    for name, result in results.items():
        if isinstance(result, ScheduleError):
            notes.append(f"{name}: {str(result).splitlines()[0]}")
        elif result.schedule.bound is not None:
            notes.append(f"{name}: no {measure} within its limit is below {result.schedule.bound:g}.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(timeline: Timeline, measure: str, best: float) -> tuple[str, ...]:
    made = timeline.schedule
    return (
        made.policy,
        f"{made.stages // made.ranks}",
        f"{timeline.makespan:g}",
        f"{timeline.span:g}",
        f"{timeline.bubble:.1%}",
        f"{timeline.bubble_span:.1%}",
        f"{max(timeline.peak):g}",
        f"{getattr(timeline, measure) / best:.2f}" if best else "1.00",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others, which are numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
