"""Legality, as a table of rules. What breaks one is refused before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.check_programs import check_programs
from plait.schedules.grid import draw
from plait.schedules.holding import Holds, allowed, evenly, held
from plait.schedules.lower import lower
from plait.schedules.schedule import Schedule
from plait.schedules.shape import Shape


class Violation(NamedTuple):
    """A broken rule: on which rank, by which action, why, and what place in the rank's order to look at."""

    rank: int
    action: Action
    why: str
    position: int


def check(schedule: Schedule, limit: float | None = None, holds: Holds | None = None) -> None:
    """ScheduleError that names the first broken rule, the rank and the action, and shows where it stands.

    `limit` is the most that a rank may hold, in micro-batches; `holds` is what one micro-batch holds, by
    default its share from the forward to the weight gradient.
    """
    for rule, broken in RULES.items():
        for violation in broken(schedule):
            raise _refusal(rule, violation, schedule)
    if limit is not None:
        for violation in _beyond(limit, holds or evenly(schedule), schedule):
            raise _refusal("memory limit", violation, schedule)
    check_programs(lower(schedule, Shape((0,) * schedule.stages, {})))


def _refusal(rule: str, violation: Violation, schedule: Schedule) -> ScheduleError:
    rank, action, why, position = violation
    picture = draw(schedule.actions, schedule.grid, around=(rank, position), mark=action)
    return ScheduleError(f"rule {rule!r} is broken on rank {rank} by {action}: {why}.\n\n{picture}")


def _placement(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if not 0 <= action.stage < schedule.stages or schedule.rank_of[action.stage] != rank:
                yield Violation(rank, action, "the stage does not live there", position)


def _once(schedule: Schedule) -> Iterator[Violation]:
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if action in seen:
                yield Violation(rank, action, "it stands there twice", position)
            if not 0 <= action.microbatch < schedule.microbatches:
                yield Violation(rank, action, "there is no such micro-batch", position)
            seen[action] = position
    backward = (Kind.I, Kind.W) if schedule.trains else ()
    for stage, rank in enumerate(schedule.rank_of):
        for microbatch in range(schedule.microbatches):
            forward, both = (Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B))
            near = seen.get(forward, seen.get(both, 0))
            if forward not in seen:
                yield Violation(rank, forward, "it is missing", near)
            for kind in backward:
                action = Action(stage, kind, microbatch)
                if (action in seen) == (both in seen):
                    why = "B, which does it too, stands there as well" if both in seen else "it is missing"
                    yield Violation(rank, action, why, seen.get(action, near))


_NEEDS = {Kind.F: (), Kind.I: (Kind.F,), Kind.B: (Kind.F,), Kind.W: (Kind.I,)}


def _order(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(actions):
            for kind in _NEEDS[action.kind]:
                if Action(action.stage, kind, action.microbatch) not in done:
                    why = f"{kind} of its stage and micro-batch has to come first"
                    yield Violation(rank, action, why, position)
            done.add(action)


_COUNTED = {Kind.F: (), Kind.I: (Kind.I,), Kind.W: (Kind.W,), Kind.B: (Kind.I, Kind.W)}


def _microbatch_order(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        following: dict[tuple[int, Kind], int] = defaultdict(int)
        for position, action in enumerate(actions):
            for kind in _COUNTED[action.kind]:
                due = following[action.stage, kind]
                if action.microbatch != due:
                    why = f"{kind} of micro-batch {due} is due (same sums, any schedule)"
                    yield Violation(rank, action, why, position)
                following[action.stage, kind] += 1


def _no_deadlock(schedule: Schedule) -> Iterator[Violation]:
    for rank, awaited in sorted(schedule.grid.missing.items()):
        position = len(schedule.grid.steps[rank])
        why = f"it waits for {awaited} of rank {schedule.rank_of[awaited.stage]} for ever"
        yield Violation(rank, schedule.actions[rank][position], why, position)


def _beyond(limit: float, holds: Holds, schedule: Schedule) -> Iterator[Violation]:
    most_allowed = allowed(limit, holds.unit)
    for rank, actions in enumerate(schedule.actions):
        for position, (most, _) in enumerate(held(actions, holds)):
            if most > most_allowed:
                why = f"with it the rank holds {float(most * holds.unit):g}, above the limit of {limit}"
                yield Violation(rank, actions[position], why, position)


RULES: dict[str, Callable[[Schedule], Iterator[Violation]]] = {
    "a stage lives on one rank": _placement,
    "every action once": _once,
    "forward, input, weights": _order,
    "no deadlock": _no_deadlock,
    "micro-batch order": _microbatch_order,
}
"""Of schedules. A memory limit is one more; those of messages are checked on what is lowered."""
