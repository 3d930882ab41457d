"""Playing a schedule: every rank does its actions in order, each as soon as all that it needs is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from plait.schedules.action import Action, Kind

Rows: TypeAlias = Sequence[Sequence[Action]]
"""Per rank, its actions in order."""


class Pace(NamedTuple):
    """How long things take, in whole numbers, per stage."""

    durations: Mapping[Kind, Sequence[int]]
    forward_hops: Sequence[int]
    """From the end of the forward before to when this stage's may start."""
    backward_hops: Sequence[int]
    """From the end of the input gradient behind to when this stage's may start."""


class Played(NamedTuple):
    """When the actions of each rank end; and for each rank that is stuck, what it waits for for ever."""

    ends: list[list[int]]
    missing: dict[int, Action]


def play(rows: Rows, pace: Pace) -> Played:
    """Linear in the number of actions.

    A forward needs the one before, a backward its own forward and the one behind, a weight gradient its own
    input gradient.
    """
    stages = len(pace.forward_hops)
    ends: list[list[int]] = [[] for _ in rows]
    done: dict[int, int] = {}
    """What was made, and when. Keys are 2 * (micro-batch * stages + stage), and one more for a backward."""
    waiting: dict[int, list[int]] = {}
    left = [iter(row) for row in rows]
    heads = [next(row, None) for row in left]
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, mine, head = left[rank], ends[rank], heads[rank]
        now = mine[-1] if mine else 0
        while head is not None:
            stage, kind, microbatch = head
            result = 2 * (microbatch * stages + stage)
            hop, own, need = 0, -1, -1
            if kind is Kind.F:
                if stage:
                    need, hop = result - 2, pace.forward_hops[stage]
            elif kind is Kind.W:
                own = result + 1
            else:
                own, result = result, result + 1
                if stage + 1 < stages:
                    need, hop = result + 2, pace.backward_hops[stage]
            if (need >= 0 and need not in done) or (own >= 0 and own not in done):
                lacking = own if own >= 0 and own not in done else need
                waiting.setdefault(lacking, []).append(rank)
                break
            if need >= 0 and done[need] + hop > now:
                now = done[need] + hop
            now += pace.durations[kind][stage]
            mine.append(now)
            if kind is not Kind.W:
                done[result] = now
                if result in waiting:
                    ready.extend(waiting.pop(result))
            head = next(row, None)
        heads[rank] = head
    return Played(ends, {rank: _result(key, stages) for key, ranks in waiting.items() for rank in ranks})


def _result(key: int, stages: int) -> Action:
    microbatch, stage = divmod(key // 2, stages)
    return Action(stage, Kind.I if key % 2 else Kind.F, microbatch)
