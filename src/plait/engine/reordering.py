"""Another order of the same actions, from what they really cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from plait.comm.mesh import Mesh
from plait.comm.text import broadcast_text
from plait.errors import PlaitError, ScheduleError
from plait.schedules.action import Action
from plait.schedules.check import check
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import AUTO, schedule
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.timeline import simulate

_REFUSED = "refused: "


def shortest_order(now: Schedule, costs: Costs, limit: float | None) -> Schedule:
    """The shortest order that is found for `costs` with every stage where it lives now; or `now`, if that is.

    `limit` is that of `plait.schedule`. ScheduleError where no order keeps it.
    """
    found = schedule(
        AUTO,
        ranks=now.ranks,
        microbatches=now.microbatches,
        costs=costs,
        limit=limit,
        rank_of=now.rank_of,
    )
    fits = limit is None or _keeps(now, limit, costs)
    # As they are run: a full backward whose gradient is sent is an input gradient and then a weight gradient.
    before, after = (simulate(one.split_backward(), costs).makespan for one in (now, found))
    return now if fits and before <= after else found


def _keeps(made: Schedule, limit: float, costs: Costs) -> bool:
    try:
        check(made, limit, costs.memory(made.ranks, made.stages))
    except ScheduleError:
        return False
    return True


def agreed_order(now: Schedule, choose: Callable[[], Schedule], mesh: Mesh) -> Schedule:
    """What rank 0 chooses, on every rank. ScheduleError on every rank where it can choose nothing.

    Communication: two broadcasts over `world`, of 8 bytes and of the order as text.
    """
    news = ""
    if mesh.rank == 0:
        try:
            news = written(choose())
        except PlaitError as error:  # the others wait
            news = f"{_REFUSED}{error}"
    news = broadcast_text(news, mesh.group("world"), mesh.device)
    if news.startswith(_REFUSED):
        raise ScheduleError(news.removeprefix(_REFUSED))
    return read(news, now)


def written(made: Schedule) -> str:
    """An order as text: who made it, then a line for each rank."""
    return "\n".join([made.policy, *(" ".join(row) for row in made.order)])


def read(text: str, now: Schedule) -> Schedule:
    """The order that `written` wrote, of stages that live where those of `now` do."""
    policy, *rows = text.split("\n")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return replace(now, policy=policy, actions=actions, bound=None)


def as_plain(made: Schedule) -> dict[str, Any]:
    """An order, and what it is an order of, as JSON holds it."""
    return {"microbatches": made.microbatches, "rank_of": list(made.rank_of), "order": written(made)}


def from_plain(told: Mapping[str, Any], now: Schedule) -> Schedule | None:
    """The order that `as_plain` gave; None where it is one of other work, or the same as now."""
    if (told["microbatches"], tuple(told["rank_of"])) != (now.microbatches, tuple(now.rank_of)):
        return None
    order = read(told["order"], now)
    return None if order.order == now.order else order


def require_same_work(other: Schedule, now: Schedule) -> None:
    """ScheduleError unless `other` is an order of the same stages, in the same places, and micro-batches."""
    for name in ("ranks", "rank_of", "microbatches"):
        mine, its = getattr(now, name), getattr(other, name)
        if mine != its:
            raise ScheduleError(
                f"the schedule's {name} is {its}, but the engine's is {mine}: stages stay where they are, so "
                "give another order of the same actions."
            )
    check(other)
