"""Simulation of one schedule for many durations: only the last end of each rank, without a timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import ScheduleError
from plait.schedules.action import SPLIT_KINDS, Kind
from plait.schedules.event_simulation import ActionRows, Timing

_KINDS = (*SPLIT_KINDS, Kind.B)


@dataclass(frozen=True)
class EventOrder:
    """The actions of all ranks in one sequence, in which every action follows those that it needs.

    `simulate_events` finds out which action can run next; with this sequence a simulation is a single loop.
    """

    ranks: int
    stages: int
    steps: tuple[tuple[int, int, int, int], ...]
    """For each action: its rank, the position of the action whose message it needs (-1: none), the index of
    the message's duration, and the index of its own, see `durations`."""

    def durations(self, timing: Timing) -> list[int]:
        """Return the durations of actions, by the indices in `steps`."""
        return [time for kind in _KINDS for time in timing.durations[kind]]

    def last_ends(self, timing: Timing) -> list[int]:
        """Return the end of each rank's last action, as `simulate_events` computes it."""
        durations = self.durations(timing)
        hops = [*timing.forward_hops, *timing.backward_hops]
        now, ends = [0] * self.ranks, list[int]()
        append = ends.append
        for rank, needed, hop, duration in self.steps:
            end = now[rank]
            if needed >= 0:
                arrival = ends[needed] + hops[hop]
                if arrival > end:
                    end = arrival
            end += durations[duration]
            now[rank] = end
            append(end)
        return now


def event_order(rows: ActionRows, stages: int) -> EventOrder:
    """Return the actions of `rows` in an order in which they can run. Raises ScheduleError for a deadlock."""
    firsts = {kind: number * stages for number, kind in enumerate(_KINDS)}
    positions: dict[tuple[int, bool, int], int] = {}  # of forwards (True) and input gradients
    waiting: dict[tuple[int, bool, int], list[int]] = {}
    steps: list[tuple[int, int, int, int]] = []
    done = [0] * len(rows)
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, index = rows[rank], done[rank]
        while index < len(row):
            stage, kind, microbatch = row[index]
            needed, hop, forward = -1, 0, kind is Kind.F
            source = stage - 1 if forward else stage + 1
            if kind is not Kind.W and 0 <= source < stages:
                key = (source, forward, microbatch)
                if key not in positions:
                    waiting.setdefault(key, []).append(rank)
                    break
                needed, hop = positions[key], stage if forward else stages + stage
            if kind is not Kind.W:
                result = (stage, forward, microbatch)
                positions[result] = len(steps)
                ready.extend(waiting.pop(result, ()))
            steps.append((rank, needed, hop, firsts[kind] + stage))
            index += 1
        done[rank] = index
    _require_all(rows, done)
    return EventOrder(len(rows), stages, tuple(steps))


def _require_all(rows: ActionRows, done: Sequence[int]) -> None:
    for rank, (row, index) in enumerate(zip(rows, done, strict=True)):
        if index < len(row):
            raise ScheduleError(
                f"the schedule has a deadlock: rank {rank} waits at {row[index]}; change the order of the "
                "actions, plait.check names the rule."
            )
