"""The order of a step and the cut of a model into stages, which depend on each other."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import PlanError
from plait.planner.balance import balance
from plait.planner.cut import Cut, makespan_of, shortest_cut, thirds_of
from plait.schedules.schedule import Schedule
from plait.search.auto import chunk_counts
from plait.search.schedule import AUTO, schedule
from plait.simulation.costs import Costs


def ordered_cut(
    policy: str,
    costs: Sequence[float],
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    limit: float | None = None,
    cut: Cut | None = None,
) -> tuple[Schedule, Cut]:
    """A schedule of `policy`, and how many layers each of its stages takes; `cut`, if one is given.

    `costs` holds one number per layer; its forward, input gradient and weight gradient are taken to cost a
    third of it each. A policy with a name is ordered for stages of the same cost. For `auto` the numbers of
    chunks that are possible are tried, each with the order found for the stages that the even cut makes;
    the shortest step wins. Raises ScheduleError and PlanError.
    """
    if policy != AUTO:
        made = schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks, limit=limit)
        if cut is not None:
            _require_cut(cut, len(costs), made.stages)
        return made, cut or shortest_cut(costs, made)
    if cut is not None:
        chunks = chunks or max(1, len(cut) // ranks)
        _require_cut(cut, len(costs), ranks * chunks)
    counts = chunk_counts(ranks, len(costs)) if chunks is None else (chunks,)
    tried = (_automatic(costs, ranks, microbatches, count, limit, cut) for count in counts)
    return min(tried, key=lambda one: makespan_of(one[1], costs, one[0]))


def _require_cut(cut: Cut, layers: int, stages: int) -> None:
    if len(cut) != stages or sum(cut) != layers or min(cut) < 1:
        raise PlanError(
            f"plan.layers_per_stage = {list(cut)} does not cut {layers} layers into {stages} stages: "
            f"give {stages} counts of at least 1 with the sum {layers}."
        )


def _automatic(
    costs: Sequence[float], ranks: int, microbatches: int, chunks: int, limit: float | None, cut: Cut | None
) -> tuple[Schedule, Cut]:
    even = cut or balance(costs, ranks * chunks)
    thirds = thirds_of(even, costs)
    stages = Costs(F=thirds, I=thirds, W=thirds)
    made = schedule(AUTO, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=stages, limit=limit)
    return made, cut or shortest_cut(costs, made)
