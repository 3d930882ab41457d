"""`search_frontier`: the Pareto frontier of step time and memory among the plans of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.estimate.search.plan_search import PlanSearchResult, plan_rank, search
from plait.estimate.time.prediction import Prediction
from plait.plan.plan import Plan

SEARCHES = 8
"""The most searches for less memory."""
STEP = 0.8
"""Of the memory of the fastest plan that was found, what the next search allows."""
OTHERS = 5
"""Plans that each search for less memory finds."""


@dataclass(frozen=True)
class PlanFrontier:
    """The Pareto frontier of step time and peak memory, and the other plans that the searches found."""

    plans: tuple[Prediction, ...]
    """All that were found, each once, in the order of `plan_rank`."""
    best: tuple[Prediction, ...]
    """Those for which every plan that was searched is slower or needs more memory, by rising time."""


def search_frontier(first: PlanSearchResult, batch: int, *, base: Plan | None = None) -> PlanFrontier:
    """Return the fastest plans for each of several memory limits, every limit below the one before.

    `first`: a search of all choices for the same `batch` and `base` that found a plan. The next
    search allows `STEP` of the memory that its fastest plan needs, and so on, until no plan fits or
    `SEARCHES` are done. A plan that is faster and smaller than one that a search found would be found before
    it, so that `best` needs only the plans that were found; between two of them there can be others.
    """
    fastest, found = first.best[0], {one.plan: one for one in first.best}
    hardware, decoder, ranks = fastest.hardware, fastest.decoder, fastest.plan.world
    for _ in range(SEARCHES):
        less = replace(hardware, memory=hardware.reserved + STEP * fastest.peak_memory)
        result = search(decoder, less, ranks, batch, base=base, most=OTHERS)
        if not result.best:
            break
        fastest = result.best[0]
        for one in result.best:
            found.setdefault(one.plan, replace(one, hardware=hardware))
    plans = sorted(found.values(), key=lambda one: plan_rank(one.step_seconds, one.peak_memory, one.plan))
    best: list[Prediction] = []
    for one in plans:
        if not best or one.peak_memory < best[-1].peak_memory:
            best.append(one)
    return PlanFrontier(tuple(plans), tuple(best))
