"""The map of a run's ranks over its steps: one number for each rank and stretch of steps."""

from __future__ import annotations

from typing import Any

from plait.pictures.report.rank_series import means_of_stretches
from plait.pictures.report.run_record import RunRecord

MOST_STRETCHES = 300
_DIGITS = 4


def rank_map(run: RunRecord) -> dict[str, Any] | None:
    """Return the numbers of each rank over stretches of steps, or None where there is one rank or none.

    `values` has a list for each rank; `what` they are is the time in which a rank was not blocked, where that
    was measured, else its peak memory.
    """
    series = run.ranks
    if series is None or series.world == 1:
        return None
    seconds = dict(zip(run.metrics.steps, run.metrics.columns.get("step_seconds", ()), strict=False))
    busy = series.busy([seconds.get(step) for step in series.steps])
    first, values = means_of_stretches(series.memory if busy is None else busy, MOST_STRETCHES)
    return {
        "what": "peak memory so far" if busy is None else "busy time of a step",
        "format": "bytes" if busy is None else "seconds",
        "steps": [series.steps[row] for row in first] + [series.steps[-1] + 1],
        "values": [[float(f"{value:.{_DIGITS}g}") for value in row] for row in values],
    }
