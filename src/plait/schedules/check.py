"""The rules of legal schedules, as a table, and `plait.check`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.plan.argument_checks import require_instance
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs, MemoryCosts, limit_in_units, memory_use
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import ExpertExchanges, LayerIndex, LoweringSpec
from plait.schedules.schedule import Schedule, draw_grid


class Violation(NamedTuple):
    """A broken rule: which rank and action break it, why, and where to show the schedule."""

    rank: int
    action: Action
    why: str
    position: int


def check(schedule: Schedule, limit: float | None = None, memory_costs: MemoryCosts | None = None) -> None:
    """Raise ScheduleError, which shows rank and action, if `schedule` breaks a rule or the memory `limit`.

    The rules are those of `RULES`, and that messages between ranks cannot deadlock. `limit` is the most that
    a rank may hold, in micro-batches; `memory_costs` is what one micro-batch holds, by default its share from
    the forward to the weight gradient. A schedule that passes runs models whose ranks exchange tokens for
    experts in each forward and backward, and all others.
    """
    require_instance("the schedule", schedule, Schedule, "give one of plait.schedule(…)", ScheduleError)
    if memory_costs is not None:
        require_instance("memory_costs", memory_costs, MemoryCosts, "give Costs.memory(…)", ScheduleError)
    for rule, violations in RULES.items():
        for violation in violations(schedule):
            raise _error(rule, violation, schedule)
    if limit is not None:
        memory_costs = memory_costs or Costs().memory(schedule.ranks, schedule.stages)
        for violation in _over_limit(limit, memory_costs, schedule):
            raise _error("memory limit", violation, schedule)
    every_stage = ExpertExchanges({LayerIndex(stage, 0) for stage in range(schedule.stages)})
    check_programs(lower(schedule, LoweringSpec((1,) * schedule.stages, {})), every_stage)


def _error(rule: str, violation: Violation, schedule: Schedule) -> ScheduleError:
    rank, action, why, position = violation
    picture = draw_grid(schedule.actions, schedule.grid, around=(rank, position), mark=action)
    return ScheduleError(f"rule {rule!r} is broken on rank {rank} by {action}: {why}.\n\n{picture}")


def _placement(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if not 0 <= action.stage < schedule.stages or schedule.rank_of[action.stage] != rank:
                yield Violation(rank, action, "its stage is not on this rank", position)


def _once(schedule: Schedule) -> Iterator[Violation]:
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if action in seen:
                yield Violation(rank, action, "it appears twice", position)
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
                    why = "B, which includes it, appears as well" if both in seen else "it is missing"
                    yield Violation(rank, action, why, seen.get(action, near))


_NEEDS = {Kind.F: (), Kind.I: (Kind.F,), Kind.B: (Kind.F,), Kind.W: (Kind.I,)}


def _order(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(actions):
            for kind in _NEEDS[action.kind]:
                if Action(action.stage, kind, action.microbatch) not in done:
                    why = f"{kind} of its stage and micro-batch must come first"
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
        why = f"it waits for {awaited} of rank {schedule.rank_of[awaited.stage]}, which never runs"
        yield Violation(rank, schedule.actions[rank][position], why, position)


def _over_limit(limit: float, costs: MemoryCosts, schedule: Schedule) -> Iterator[Violation]:
    allowed = limit_in_units(limit, costs.unit)
    for rank, actions in enumerate(schedule.actions):
        for position, (most, _) in enumerate(memory_use(actions, costs)):
            if most > allowed:
                why = f"with it the rank holds {float(most * costs.unit):g}, above the limit of {limit}"
                yield Violation(rank, actions[position], why, position)


RULES: dict[str, Callable[[Schedule], Iterator[Violation]]] = {
    "one rank per stage": _placement,
    "every action once": _once,
    "forward, input, weights": _order,
    "no deadlock": _no_deadlock,
    "micro-batch order": _microbatch_order,
}
"""Rules of schedules, except the memory limit and the rules of messages (`check_programs`)."""
