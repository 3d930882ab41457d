"""Rescheduling: computes a shorter order of the same actions for measured costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from plait.comm.mesh import Mesh
from plait.comm.text_collectives import broadcast_result
from plait.errors import ScheduleError
from plait.schedules.action import Action
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.memory import is_within
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import AUTO, schedule
from plait.schedules.timed_schedule import simulated


def shortest_schedule(now: Schedule, costs: Costs, limit: float | None) -> Schedule:
    """Return a schedule shorter than `now` at these `costs`, with the same stages on each rank, else `now`.

    `limit` is that of `plait.schedule`; `now` is not returned if it exceeds it. Raises ScheduleError where no
    schedule is within it.
    """
    found = schedule(
        AUTO, ranks=now.ranks, microbatches=now.microbatches, costs=costs, limit=limit, rank_of=now.rank_of
    )
    fits = limit is None or is_within(now, limit, costs.memory(now.ranks, now.stages))
    # As the executor runs them: a `B` whose gradient is sent is an `I` and then a `W`.
    before, after = (simulated(one.split_backward, costs).makespan for one in (now, found))
    return now if fits and before <= after else found


def schedule_from_rank_zero(now: Schedule, choose: Callable[[], Schedule], mesh: Mesh) -> Schedule:
    """Return rank 0's result of `choose` on every rank. Raises ScheduleError on all if `choose` fails.

    Communication: two broadcasts over `world`, of 8 bytes and of the order as text.
    """
    world = mesh.group("world")
    text = broadcast_result(lambda: json.dumps(to_json(choose())), ScheduleError, world, mesh.device)
    return from_json(json.loads(text), now) or now


def to_json(order: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON values: policy, actions of each rank, micro-batches, rank of each stage."""
    lines = [order.policy, *(" ".join(row) for row in order.order)]
    return {"microbatches": order.microbatches, "rank_of": list(order.rank_of), "order": "\n".join(lines)}


def from_json(state: Mapping[str, Any], now: Schedule) -> Schedule | None:
    """Return the schedule that `to_json` wrote; None if it equals `now` or is for another pipeline.

    Another pipeline has another number of micro-batches, or a stage on another rank.
    """
    if (state["microbatches"], tuple(state["rank_of"])) != (now.microbatches, tuple(now.rank_of)):
        return None
    policy, *rows = state["order"].split("\n")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return None if actions == now.actions else replace(now, policy=policy, actions=actions, bound=None)


def require_same_actions(other: Schedule, now: Schedule) -> None:
    """Raise ScheduleError unless `other` is valid and has the micro-batches and stages of `now`."""
    for name in ("ranks", "rank_of", "microbatches"):
        expected, found = getattr(now, name), getattr(other, name)
        if expected != found:
            raise ScheduleError(
                f"the schedule's {name} is {found}, but the engine's is {expected}: stages stay where they "
                "are, so give another order of the same actions."
            )
    check(other)
