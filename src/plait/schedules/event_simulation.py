"""The end of each action, if each rank runs its own in order, as early as possible; also on shared cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import SPLIT_KINDS, Action, Kind

ActionRows: TypeAlias = Sequence[Sequence[Action]]
"""Per rank, its actions in order."""
_KINDS = (*SPLIT_KINDS, Kind.B)


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


class SharedTimes(NamedTuple):
    """Starts and ends of the actions of each rank, in the order of its actions."""

    starts: list[list[float]]
    ends: list[list[float]]

    def busy(self, rank: int) -> float:
        """Return the total time in which a rank runs actions."""
        return sum(self.ends[rank]) - sum(self.starts[rank])


def simulate_shared(order: EventOrder, timing: Timing, speedup: float) -> SharedTimes:
    """Return when each action of a schedule starts and ends, if ranks share CPU cores.

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
