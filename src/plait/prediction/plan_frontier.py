"""`search_frontier`: the fastest plans for less and less memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.plan import Plan
from plait.prediction.framework import PLAIT, Framework
from plait.prediction.plan_search import PlanSearchResult, search
from plait.prediction.step_prediction import Prediction

SEARCHES = 8
"""The most searches for less memory."""
STEP = 0.8
"""Of the memory of the fastest plan that was found, what the next search allows."""
OTHERS = 5
"""Plans that each search for less memory finds."""


@dataclass(frozen=True)
class PlanFrontier:
    """Plans of which none is both faster and smaller, with the others that the searches found."""

    plans: tuple[Prediction, ...]
    """All that were found, each once: first those of the search for all the memory."""
    best: tuple[Prediction, ...]
    """The fastest of each search, by falling memory: no plan of all those searched needs less and is faster."""


def search_frontier(
    first: PlanSearchResult, batch: int, *, base: Plan | None = None, framework: Framework = PLAIT
) -> PlanFrontier:
    """Return the fastest plans for less and less memory, each as exact as `search`.

    `first`: a search of all choices for the same `batch`, `base` and `framework` that found a plan. The next
    search allows `STEP` of the memory that its
    fastest plan needs, and so on, until no plan fits or `SEARCHES` are done.
    """
    fastest = first.best[0]
    hardware, decoder, ranks = fastest.hardware, fastest.decoder, fastest.plan.world
    plans, best = {found.plan: found for found in first.best}, [fastest]
    for _ in range(SEARCHES):
        less = replace(hardware, memory=hardware.reserved + STEP * best[-1].peak_memory)
        result = search(decoder, less, ranks, batch, base=base, most=OTHERS, framework=framework)
        if not result.best:
            break
        found = [replace(one, hardware=hardware) for one in result.best]
        best.append(found[0])
        for one in found:
            plans.setdefault(one.plan, one)
    return PlanFrontier(tuple(plans.values()), tuple(best))
