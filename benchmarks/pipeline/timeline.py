"""A measured step beside its simulation, from what plait records of itself.

Costs are medians over the micro-batches of the recorded step, per stage; the simulation runs the same actions
with these costs. `comm` is the median time of a message for which a rank waited already.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import plait
from plait.engine import Recording


class Result(NamedTuple):
    """Of a step, or medians over steps; times are milliseconds."""

    measured: float
    """From the first action's start on any rank to the last one's end."""
    simulated: float
    ratio: float
    comm: float
    computing: Sequence[float]
    """Per rank."""
    waiting: Sequence[float]
    """Per rank: for messages."""
    policy: str


def result_of(recording: Recording) -> Result:
    """What the recorded step took, and what it should."""
    timeline, costs = recording.timeline(), recording.costs()
    simulated = plait.simulate(timeline.schedule, costs).makespan
    computing = [timeline.makespan - idle for idle in timeline.idle]
    ratio = timeline.makespan / simulated
    return Result(
        timeline.makespan,
        simulated,
        ratio,
        costs.comm,
        computing,
        recording.waits(),
        timeline.schedule.policy,
    )


def median_of(steps: Sequence[Sequence[object]]) -> Result:
    """Of several steps, as they come from JSON."""
    results = [Result(*step) for step in steps]  # type: ignore[arg-type]
    single = [median(getattr(result, name) for result in results) for name in Result._fields[:4]]
    each = [
        [median(rank) for rank in zip(*(getattr(result, name) for result in results), strict=True)]
        for name in ("computing", "waiting")
    ]
    return Result(*single, *each, results[-1].policy)  # type: ignore[arg-type]
