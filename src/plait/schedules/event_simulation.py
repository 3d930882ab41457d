"""The end of each action, if each rank runs its own in order, as early as possible; also on shared cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class EventOrder:
    """All ranks' actions in one sequence in which they can run: each after the actions it needs."""

    ranks: int
    stages: int
    steps: tuple[tuple[int, int, int, int], ...]
    """For each action: its rank, the position of the action whose message it needs (-1: none), the index of
    the message's duration, and the index of its own, see `durations`."""
    missing: Mapping[int, Action]
    """For each rank in a deadlock, the action that it waits for; its own from there on are left out."""

    def durations(self, timing: Timing) -> list[int]:
        """Return the durations of all kinds and stages as one list, into which `steps` have indices."""
        return [time for kind in Kind for time in timing.durations[kind]]

    def ends(self, timing: Timing) -> list[list[int]]:
        """Return when each rank's actions end, if each rank runs its own in order, as early as possible."""
        durations, hops = self.durations(timing), [*timing.forward_hops, *timing.backward_hops]
        rows: list[list[int]] = [[] for _ in range(self.ranks)]
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
            rows[rank].append(end)
        return rows

    def last_ends(self, timing: Timing) -> list[int]:
        """Return when each rank's last action ends, 0 for a rank without actions."""
        return [row[-1] if row else 0 for row in self.ends(timing)]


def event_order(rows: ActionRows, stages: int) -> EventOrder:
    """Return an order in which the actions of `rows` can run, and what ranks in a deadlock wait for.

    A forward needs the previous stage's, a backward its own forward and the next stage's backward, a weight
    gradient its own input gradient. Linear in the number of actions.
    """
    firsts = {kind: number * stages for number, kind in enumerate(Kind)}
    positions: dict[tuple[int, bool, int], int] = {}  # of forwards (True) and input gradients
    waiting: dict[tuple[int, bool, int], list[int]] = {}
    steps: list[tuple[int, int, int, int]] = []
    left = [iter(row) for row in rows]
    heads = [next(row, None) for row in left]
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        action = heads[rank]
        while action is not None:
            stage, kind, microbatch = action
            forward, weights = kind is Kind.F, kind is Kind.W
            needed, hop, source = -1, 0, stage - 1 if forward else stage + 1
            own, other = (stage, not weights, microbatch), (source, forward, microbatch)
            if not forward and own not in positions:
                waiting.setdefault(own, []).append(rank)
                break
            if not weights and 0 <= source < stages:
                if other not in positions:
                    waiting.setdefault(other, []).append(rank)
                    break
                needed, hop = positions[other], stage if forward else stages + stage
            if not weights:
                result = (stage, forward, microbatch)
                positions[result] = len(steps)
                ready.extend(waiting.pop(result, ()))
            steps.append((rank, needed, hop, firsts[kind] + stage))
            action = next(left[rank], None)
        heads[rank] = action
    missing = {
        rank: Action(stage, Kind.F if forward else Kind.I, microbatch)
        for (stage, forward, microbatch), ranks in waiting.items()
        for rank in ranks
    }
    return EventOrder(len(rows), stages, tuple(steps), missing)


class SharedTimes(NamedTuple):
    """When each rank's actions start and end, if all ranks share CPU cores."""

    starts: list[list[float]]
    ends: list[list[float]]

    def busy(self, rank: int) -> float:
        """Return the total time in which a rank runs actions."""
        return sum(self.ends[rank]) - sum(self.starts[rank])


def simulate_shared(order: EventOrder, timing: Timing, speedup: float) -> SharedTimes:
    """Return when each action starts and ends if ranks share CPU cores: waiting ranks speed up others.

    Each rank runs its actions in order, as early as possible.

    `timing`: durations while all ranks compute. Where k of n do, each is n / k times as fast, at most
    `speedup` times. Messages take as long as ever. Linear in the number of actions, times that of ranks.
    """
    durations, hops = order.durations(timing), [*timing.forward_hops, *timing.backward_hops]
    rows: list[list[int]] = [[] for _ in range(order.ranks)]
    for position, (rank, *_) in enumerate(order.steps):
        rows[rank].append(position)
    done: dict[int, float] = {}
    found = SharedTimes([[] for _ in rows], [[] for _ in rows])
    left: dict[int, float] = {}  # of the ranks that compute, the work of their action
    now = 0.0
    while len(done) < len(order.steps):
        arrivals = []
        for rank, row in enumerate(rows):
            begun = len(found.starts[rank])
            if rank in left or begun == len(row):
                continue
            _, needed, hop, duration = order.steps[row[begun]]
            if needed >= 0 and needed not in done:
                continue
            arrival = done[needed] + hops[hop] if needed >= 0 else now
            if arrival > now:
                arrivals.append(arrival)
            else:
                found.starts[rank].append(now)
                left[rank] = durations[duration]
        rate = min(speedup, order.ranks / len(left)) if left else 1.0
        step = min([*(work / rate for work in left.values()), *(arrival - now for arrival in arrivals)])
        now += step
        for rank, work in [*left.items()]:
            left[rank] = work - step * rate
            if work / rate <= step:
                del left[rank]
                done[rows[rank][len(found.ends[rank])]] = now
                found.ends[rank].append(now)
    return found
