"""Simulates a pipeline schedule on ranks that share CPU cores: while some wait, the others are faster."""

from __future__ import annotations

from typing import NamedTuple

from plait.schedules.event_order import EventOrder
from plait.schedules.event_simulation import Timing


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
