"""Event simulation: the end of each action, if each rank runs its own in order, as early as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from plait.schedules.action import Action, Kind

ActionRows: TypeAlias = Sequence[Sequence[Action]]
"""Per rank, its actions in order."""


class Timing(NamedTuple):
    """Integer durations in a common unit: of actions by kind and stage, of messages by receiving stage."""

    durations: Mapping[Kind, Sequence[int]]
    forward_hops: Sequence[int]
    """From the end of the previous stage's forward to the earliest start of this stage's."""
    backward_hops: Sequence[int]
    """From the end of the next stage's input gradient to the earliest start of this stage's."""


class EventTimes(NamedTuple):
    """End times of each rank's actions; for each deadlocked rank, the action that it waits for."""

    ends: list[list[int]]
    missing: dict[int, Action]


def simulate_events(rows: ActionRows, timing: Timing) -> EventTimes:
    """Return the end time of each action if each rank runs its row of `rows` in order, as early as possible.

    A forward needs the previous stage's, a backward its own forward and the next stage's backward, a weight
    gradient its own input gradient. Linear in the number of actions.
    """
    stages = len(timing.forward_hops)
    ends: list[list[int]] = [[] for _ in rows]
    # Keys are plain tuples, equal to the actions and faster to make. A `B` is entered as its `I`.
    done: dict[tuple[int, Kind, int], int] = {}
    waiting: dict[tuple[int, Kind, int], list[int]] = {}
    left = [iter(row) for row in rows]
    heads = [next(row, None) for row in left]
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, own_ends, action = left[rank], ends[rank], heads[rank]
        now = own_ends[-1] if own_ends else 0
        while action is not None:
            stage, kind, microbatch = action
            result: tuple[int, Kind, int] = action
            own = other = None
            hop = 0
            if kind is Kind.F:
                if stage:
                    other, hop = (stage - 1, Kind.F, microbatch), timing.forward_hops[stage]
            elif kind is Kind.W:
                own = (stage, Kind.I, microbatch)
            else:
                own, result = (stage, Kind.F, microbatch), (stage, Kind.I, microbatch)
                if stage + 1 < stages:
                    other, hop = (stage + 1, Kind.I, microbatch), timing.backward_hops[stage]
            if own is not None and own not in done:
                waiting.setdefault(own, []).append(rank)
                break
            if other is not None:
                if other not in done:
                    waiting.setdefault(other, []).append(rank)
                    break
                now = max(now, done[other] + hop)
            now += timing.durations[kind][stage]
            own_ends.append(now)
            if kind is not Kind.W:
                done[result] = now
                if result in waiting:
                    ready.extend(waiting.pop(result))
            action = next(row, None)
        heads[rank] = action
    return EventTimes(ends, {rank: Action(*key) for key, ranks in waiting.items() for rank in ranks})
