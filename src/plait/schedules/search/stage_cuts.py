"""The joint choice of a step's schedule and of the cut of the model into stages.

Stages of even cost are not always best: in a short step the first and last stages also pay for filling and
draining the pipeline. So the even cut is only the start of the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from plait.errors import PlanError, ScheduleError
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import AUTO, default_chunks, schedule
from plait.schedules.search.auto import chunk_counts
from plait.schedules.search.balance import balance
from plait.schedules.search.cut_simulation import CutSimulation
from plait.schedules.search.layer_costs import LayerCosts
from plait.schedules.timed_schedule import simulated

MOST_ACTIONS = 1 << 17
"""Actions simulated in one search, so that it takes a tenth of a second or so."""

StageCut = tuple[int, ...]
"""Number of layers per stage, first stage first."""


def schedule_and_cut(
    policy: str,
    costs: LayerCosts,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    limit: float | None = None,
    cut: StageCut | None = None,
) -> tuple[Schedule, StageCut]:
    """Return a schedule of `policy` and the number of layers of each stage (`cut`, if given).

    A named policy is made for stages of equal cost. For `auto` each possible number of chunks is tried, with
    the schedule found for the even cut; the shortest step within `limit` wins. Raises PlanError, and
    ScheduleError where no schedule keeps the limit.
    """
    layers = len(costs.total)
    if policy != AUTO:
        made = schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks, limit=limit)
        if cut is not None:
            _require_cut(cut, layers, made.stages)
        return made, cut or fastest_cut(costs, made)
    if cut is not None:
        chunks = chunks or default_chunks(policy, ranks=ranks, stages=len(cut))
        _require_cut(cut, layers, ranks * chunks)
    counts = chunk_counts(ranks, layers) if chunks is None else (chunks,)
    found, errors = [], []
    for count in counts:
        try:
            found.append(_automatic(costs, ranks, microbatches, count, limit, cut))
        except ScheduleError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    return min(found, key=lambda pair: simulated(pair[0], costs.of_stages(pair[1])).makespan)


def _require_cut(cut: StageCut, layers: int, stages: int) -> None:
    if len(cut) != stages or sum(cut) != layers or min(cut) < 1:
        raise PlanError(
            f"plan.layers_per_stage = {list(cut)} does not cut {layers} layers into {stages} stages: "
            f"give {stages} counts of at least 1 with the sum {layers}."
        )


@lru_cache(maxsize=64)  # a search takes seconds, and a process may build one blueprint many times
def _automatic(
    costs: LayerCosts, ranks: int, microbatches: int, chunks: int, limit: float | None, cut: StageCut | None
) -> tuple[Schedule, StageCut]:
    stages = costs.of_stages(cut or balance(costs.total, ranks * chunks))
    made = schedule(AUTO, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=stages, limit=limit)
    return made, cut or fastest_cut(costs, made)


def fastest_cut(costs: LayerCosts, schedule: Schedule) -> StageCut:
    """Return the layers per stage with the least simulated makespan of `schedule`, found by local search.

    From the even cut (`balance`), boundaries move by one layer as long as that helps.
    Raises `PlanError` as `balance` does.
    """
    best = balance(costs.total, schedule.stages)
    if schedule.stages == 1:
        return best
    simulation = CutSimulation(costs, schedule.split_backward)
    left = MOST_ACTIONS // sum(len(actions) for actions in simulation.schedule.actions)
    makespan = simulation.makespan(best)
    improved = True
    while improved:
        improved = False
        for cut in _neighbours(best):
            left -= 1
            if left < 0:
                return best
            if simulation.least(cut) >= makespan:
                continue
            candidate = simulation.makespan(cut)
            if candidate < makespan:
                best, makespan, improved = cut, candidate, True
    return best


def _neighbours(cut: StageCut) -> Iterator[StageCut]:
    """Yield every cut into stages that differs from `cut` by one boundary moved by one layer."""
    for stage in range(len(cut) - 1):
        for step in (1, -1):
            moved = list(cut)
            moved[stage] += step
            moved[stage + 1] -= step
            if min(moved) > 0:
                yield tuple(moved)
