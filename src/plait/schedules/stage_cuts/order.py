"""The order of a step and the cut of a model into stages, which depend on each other."""

from __future__ import annotations

from functools import lru_cache

from plait.errors import PlanError, ScheduleError
from plait.schedules.schedule import Schedule
from plait.schedules.search.auto import chunk_counts
from plait.schedules.search.schedule import AUTO, schedule, usual_chunks
from plait.schedules.stage_cuts.balance import balance
from plait.schedules.stage_cuts.cut import Cut, makespan_of, shortest_cut
from plait.schedules.stage_cuts.layer_costs import LayerCosts


def ordered_cut(
    policy: str,
    costs: LayerCosts,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    limit: float | None = None,
    cut: Cut | None = None,
) -> tuple[Schedule, Cut]:
    """A schedule of `policy`, and how many layers each of its stages takes; `cut`, if one is given.

    A policy with a name is ordered for stages of the same cost. For `auto` the numbers of
    chunks that are possible are tried, each with the order found for the stages that the even cut makes;
    the shortest step among those that keep `limit` wins. Raises PlanError, and ScheduleError where none does.
    """
    layers = len(costs.total)
    if policy != AUTO:
        made = schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks, limit=limit)
        if cut is not None:
            _require_cut(cut, layers, made.stages)
        return made, cut or shortest_cut(costs, made)
    if cut is not None:
        chunks = chunks or usual_chunks(policy, ranks=ranks, stages=len(cut))
        _require_cut(cut, layers, ranks * chunks)
    counts = chunk_counts(ranks, layers) if chunks is None else (chunks,)
    found, refusals = [], []
    for count in counts:
        try:
            found.append(_automatic(costs, ranks, microbatches, count, limit, cut))
        except ScheduleError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[-1]
    return min(found, key=lambda one: makespan_of(one[1], costs, one[0]))


def _require_cut(cut: Cut, layers: int, stages: int) -> None:
    if len(cut) != stages or sum(cut) != layers or min(cut) < 1:
        raise PlanError(
            f"plan.layers_per_stage = {list(cut)} does not cut {layers} layers into {stages} stages: "
            f"give {stages} counts of at least 1 with the sum {layers}."
        )


@lru_cache(maxsize=64)  # it takes seconds, and a process may draw one plan many times, as verify does
def _automatic(
    costs: LayerCosts, ranks: int, microbatches: int, chunks: int, limit: float | None, cut: Cut | None
) -> tuple[Schedule, Cut]:
    stages = costs.of_stages(cut or balance(costs.total, ranks * chunks))
    made = schedule(AUTO, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=stages, limit=limit)
    return made, cut or shortest_cut(costs, made)
