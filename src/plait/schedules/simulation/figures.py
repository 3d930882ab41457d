"""A timeline in figures, and its schedule, as one object of JSON."""

from __future__ import annotations

from plait.schedules.simulation.timeline import Timeline


def figures(timeline: Timeline) -> dict[str, object]:
    """What `plait schedule --json` prints, and what a run keeps of its order."""
    made = timeline.schedule
    return {
        "policy": made.policy,
        "ranks": made.ranks,
        "chunks": made.stages // made.ranks,
        "microbatches": made.microbatches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_span": timeline.bubble_span,
        "peak": timeline.peak,
        "order": made.order,
        "rank_of": made.rank_of,
        **({} if made.bound is None else {"bound": made.bound}),
    }
