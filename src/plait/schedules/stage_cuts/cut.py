"""Cutting a model into stages so that the simulated step is shortest.

Stages of even cost are not always best: in a short step the first and last stages also pay for filling
and draining the pipeline. So the even cut is only where the search starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule
from plait.schedules.simulation.timeline import simulate
from plait.schedules.stage_cuts.balance import balance
from plait.schedules.stage_cuts.layer_costs import LayerCosts

MOST_ACTIONS = 1 << 17
"""Actions simulated in one search, so that it takes about a second at most."""

Cut = tuple[int, ...]
"""Layers per stage, first stage first."""


def shortest_cut(costs: LayerCosts, schedule: Schedule) -> Cut:
    """Layers per stage for which `schedule` has the least simulated makespan, as far as single moves reach.

    From the even cut (`balance`), boundaries move by one layer as long as that helps.
    Raises `PlanError` as `balance` does.
    """
    best = balance(costs.total, schedule.stages)
    split = split_backward(schedule)
    allowed = MOST_ACTIONS // sum(len(actions) for actions in split.actions)
    makespan = makespan_of(best, costs, split)
    improved = True
    while improved:
        improved = False
        for cut in _neighbours(best):
            allowed -= 1
            if allowed < 0:
                return best
            candidate = makespan_of(cut, costs, split)
            if candidate < makespan:
                best, makespan, improved = cut, candidate, True
    return best


def split_backward(schedule: Schedule) -> Schedule:
    """The same schedule with each `B` as the `I` and `W` that it is run as, a message between them."""
    actions = tuple(tuple(part for action in rank for part in _parts(action)) for rank in schedule.actions)
    return Schedule(schedule.policy, schedule.microbatches, schedule.rank_of, actions)


def _parts(action: Action) -> Iterator[Action]:
    kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
    for kind in kinds:
        yield Action(action.stage, kind, action.microbatch)


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """Every cut in which one boundary moved by one layer."""
    for stage in range(len(cut) - 1):
        for step in (1, -1):
            moved = list(cut)
            moved[stage] += step
            moved[stage + 1] -= step
            if min(moved) > 0:
                yield tuple(moved)


def makespan_of(cut: Cut, costs: LayerCosts, schedule: Schedule) -> float:
    """How long a step of `schedule` is simulated to take with layers of such costs."""
    return simulate(schedule, costs.of_stages(cut)).makespan
