"""Settling: from orders of operations to a schedule in time, in which idle ranks bring later work forward.

Each rank does its operations in order. While the next one cannot start yet, it looks further down its order
for one that can: a weight gradient, or a forward, if there is memory for it, so that what waits fills the
bubbles (list scheduling by events, Graham 1969; with orders as priorities).

`justify` settles orders from the front and from the back in turns. From the back everything moves as late
as it can, and room appears at the front (justification of project schedules: Valls, Ballestín and
Quintanilla 2005). A few rounds of it are most of what the search does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random
from typing import NamedTuple

from plait.schedules.search.problem import Orders, Problem, View

NEVER = 1 << 4096
PATIENCE = 2
"""Rounds of justification without gain before it ends."""


@dataclass(frozen=True)
class Habit:
    """How ranks fill their gaps."""

    gap: float = 0.5
    """Fill a gap that is at least this part of what goes into it; the rest delays what comes after."""
    spare_last: bool = False
    """Whether what somebody waits for goes before what nobody does."""
    unrest: float = 0.0
    """How often, of 1, a rank does something else than what is next, though that could start."""
    noise: float = 0.0
    """By how much `gap` varies from one decision to the next."""


class Settled(NamedTuple):
    """A schedule in time, or the mirror image of one."""

    length: int
    """From the first start to the last end."""
    orders: Orders
    ends: list[int]
    """Per operation."""

    def reversed(self) -> Orders:
        """Its orders from the last to the first."""
        return [order[::-1] for order in self.orders]


class Effort:
    """How much a search may do, in operations settled: its result never depends on a clock."""

    def __init__(self, allowed: float) -> None:
        self.left = allowed

    def spend(self, operations: int) -> None:
        """So many more were settled."""
        self.left -= operations


def settle(
    view: View,
    orders: Orders,
    limit: int,
    habit: Habit,
    chance: Random | None = None,
    others: Mapping[int, Habit] | None = None,
) -> Settled:
    """Settle `orders`, which can be run and hold at most `limit`.

    With `chance`, ranks have unrest and noise, else not. `others`: ranks with other habits.
    """
    habits = [(others or {}).get(rank, habit) for rank in range(len(orders))]
    settling = _Settling(view, orders, limit, habits, chance)
    settling.run()
    ends = settling.ends
    assert min(ends) >= 0, "orders that cannot be run"
    length = max(ends[order[-1]] + late for order, late in zip(settling.done, view.closes, strict=True))
    return Settled(length, settling.done, ends)


def justify(
    problem: Problem, start: Settled, habit: Habit, rounds: int, effort: Effort | None = None
) -> Settled:
    """The best of a few rounds of settling from the back and from the front, from `start` on."""
    effort = effort or Effort(float("inf"))
    best = now = start
    patience = PATIENCE
    for _ in range(rounds):
        if patience == 0 or effort.left <= 0:
            break
        effort.spend(2 * problem.size)
        late = settle(problem.mirrored, now.reversed(), problem.limit, habit)
        now = settle(problem.ahead, late.reversed(), problem.limit, habit)
        patience = PATIENCE if now.length < best.length else patience - 1
        best = min(best, now, key=lambda settled: settled.length)
    return best


class _Settling:
    """Ranks at work: what is done and when it ended, and how far each order and each lane is."""

    def __init__(
        self, view: View, orders: Orders, limit: int, habits: Sequence[Habit], chance: Random | None
    ) -> None:
        self.view, self.orders, self.limit, self.habits, self.chance = view, orders, limit, habits, chance
        self.done: Orders = [[] for _ in orders]
        self.ends = [-1] * len(view.lane)
        self.places = [0] * len(view.lane)
        for order in orders:
            for place, operation in enumerate(order):
                self.places[operation] = place
        self.next = [0] * len(orders)
        microbatches = view.microbatches
        self.lane = count, _, _ = len(microbatches), microbatches.step, microbatches[-1]
        """How many operations a lane has, from one to the next, and the micro-batch of the last."""
        self.heads = [[lane * count + microbatches[0] for lane in lanes] for lanes in view.lanes]
        """The first operation of each lane that is not known to be done."""
        self.free = list(view.opens)
        self.held = [0] * len(orders)
        self.woken = list(view.opens)
        """When each rank looks again for something to do; NEVER if only a result of another can wake it."""
        self.events = [(time, rank) for rank, time in enumerate(self.woken)]
        heapify(self.events)

    def run(self) -> None:
        """Let each rank work in its order when it is woken, and fill gaps where it has to wait.

        Everything that the loop reads is a local variable: it is most of the time of a search.
        """
        view, ends, free, held, chance = self.view, self.ends, self.free, self.held, self.chance
        needs, delay, duration, grows = view.needs, view.delay, view.duration, view.grows
        feeds, rank_of = view.feeds, view.rank
        events, woken, following, wake, filler = self.events, self.woken, self.next, self._wake, self._filler
        while events:
            now, rank = heappop(events)
            if now != woken[rank]:
                continue
            woken[rank] = NEVER
            start, place, unrest = now, following[rank], self.habits[rank].unrest
            order, done = self.orders[rank], self.done[rank]
            size = len(order)
            while True:
                while place < size and ends[order[place]] >= 0:
                    place += 1
                following[rank] = place
                if place == size:
                    break
                operation = order[place]
                need = needs[operation]
                ready = 0
                if need >= 0:
                    ready = ends[need] + delay[operation] if ends[need] >= 0 else NEVER
                if ready > now or (chance is not None and chance.random() < unrest):
                    if now > start and events and events[0][0] < now:
                        wake(rank, now)  # what the others do until now may matter
                        break
                    operation = filler(rank, operation, now, ready)
                    if operation < 0:
                        break
                now += duration[operation]
                ends[operation] = free[rank] = now
                held[rank] += grows[operation]
                done.append(operation)
                follower = feeds[operation]
                if follower >= 0 and (other := rank_of[follower]) != rank:
                    arrives = now + delay[follower]
                    time = arrives if arrives > free[other] else free[other]
                    if time < woken[other]:
                        wake(other, time)

    def _wake(self, rank: int, time: int) -> None:
        if time < self.woken[rank]:
            self.woken[rank] = time
            heappush(self.events, (time, rank))

    def _filler(self, rank: int, following: int, now: int, ready: int) -> int:
        """Something to do before `following`, the next operation of the order, is `ready`; or -1."""
        view, ends, habit = self.view, self.ends, self.habits[rank]
        needs, after, grows = view.needs, view.after, view.grows
        gap, soonest = habit.gap, ready
        if self.chance is not None:
            gap += habit.noise * (self.chance.random() - 0.5)
        choices = []
        for operation in self._heads(rank):
            if operation == following or (after[operation] >= 0 and ends[after[operation]] < 0):
                continue
            need = needs[operation]
            if need >= 0:
                if ends[need] < 0:
                    continue
                start = ends[need] + view.delay[operation]
                if start > now:
                    soonest = min(soonest, start)
                    continue
            if ready <= now or ready - now >= gap * view.duration[operation]:
                last = habit.spare_last and view.spare[operation]
                choices.append((last, self.places[operation], operation))
        for _, place, operation in sorted(choices):
            if grows[operation] <= 0 or self._has_room(rank, place):
                return operation
        if ready <= now:
            return following
        if soonest < NEVER:
            self._wake(rank, soonest)
        return -1

    def _heads(self, rank: int) -> list[int]:
        """The first operation of each lane that is not done; lanes that are done are dropped."""
        ends, heads = self.ends, self.heads[rank]
        ended = False
        for index, operation in enumerate(heads):
            if ends[operation] >= 0:
                count, step, last = self.lane
                while ends[operation] >= 0 and operation % count != last:
                    operation += step
                heads[index] = operation
                ended = ended or ends[operation] >= 0
        if ended:
            heads = self.heads[rank] = [operation for operation in heads if ends[operation] < 0]
        return heads

    def _has_room(self, rank: int, place: int) -> bool:
        """Whether what stands at `place` of the order can be held from now on."""
        view, order = self.view, self.orders[rank]
        held = self.held[rank]
        room = self.limit - view.grows[order[place]]
        if held > room:
            return False
        for operation in order[self.next[rank] : place]:
            if self.ends[operation] < 0:
                held += view.grows[operation]
                if held > room:
                    return False
        return True
