"""List scheduling: converts orders of operations to start times; idle ranks run later operations early.

Each rank runs its operations in order. While the next one cannot start yet, it runs a later one of its order
that can: a weight gradient, or a forward if there is memory for it, so that bubbles are filled (list
scheduling by events, Graham 1969; the orders are the priorities).

`justify` schedules orders from the back and from the front in turns. From the back every operation moves as
late as it can, which frees time at the front (justification of project schedules: Valls, Ballestín and
Quintanilla 2005). The search spends most of its time in a few rounds of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random
from typing import NamedTuple

from plait.schedules.search.problem import OperationTables, Orders, Problem, positions_in

NEVER = 1 << 4096
PATIENCE = 2
"""Number of rounds of justification without gain after which it ends."""


@dataclass(frozen=True)
class DispatchRule:
    """How an idle rank chooses its next action."""

    gap: float = 0.5
    """Fill a gap that is at least this part of the operation; the rest delays the following operations."""
    consumed_first: bool = False
    """Whether operations whose result is needed go before those whose result is not."""
    swap_chance: float = 0.0
    """Probability of running another operation although the next one could start."""
    gap_noise: float = 0.0
    """Range in which `gap` varies at random from one decision to the next."""


class TimedOrders(NamedTuple):
    """Each rank's operations in order, with their end times in ticks (units of time)."""

    length: int
    """From the first start to the last end."""
    orders: Orders
    ends: list[int]
    """Per operation."""

    def reversed(self) -> Orders:
        """Return each rank's operations in reverse order."""
        return [order[::-1] for order in self.orders]


@dataclass
class Budget:
    """How many operations a search may still schedule; unlike a time limit, this is reproducible."""

    left: float


def list_schedule(
    tables: OperationTables,
    orders: Orders,
    limit: int,
    rule: DispatchRule,
    rng: Random | None = None,
    overrides: Mapping[int, DispatchRule] | None = None,
) -> TimedOrders:
    """Return `orders` with end times; where a rank would wait, it runs a later operation instead.

    `orders` must be runnable within the memory `limit`. Without `rng`, `swap_chance` and `gap_noise` have no
    effect. `overrides`: rules of single ranks.
    """
    rules = [(overrides or {}).get(rank, rule) for rank in range(len(orders))]
    scheduler = _ListScheduler(tables, orders, limit, rules, rng)
    scheduler.run()
    ends = scheduler.ends
    assert min(ends) >= 0, "orders that cannot be run"
    length = max(
        ends[order[-1]] + late for order, late in zip(scheduler.done, tables.end_offsets, strict=True)
    )
    return TimedOrders(length, scheduler.done, ends)


def justify(
    problem: Problem, start: TimedOrders, rule: DispatchRule, rounds: int, budget: Budget | None = None
) -> TimedOrders:
    """Return the shortest of `start` and at most `rounds` list schedules, made backward, then forward."""
    budget = budget or Budget(float("inf"))
    best = now = start
    patience = PATIENCE
    for _ in range(rounds):
        if patience == 0 or budget.left <= 0:
            break
        budget.left -= 2 * problem.size
        late = list_schedule(problem.mirrored_tables, now.reversed(), problem.limit, rule)
        now = list_schedule(problem.tables, late.reversed(), problem.limit, rule)
        patience = PATIENCE if now.length < best.length else patience - 1
        best = min(best, now, key=lambda timed: timed.length)
    return best


class _ListScheduler:
    """State of a list-scheduling run: operations' end times, and the next operations of ranks and stages."""

    def __init__(
        self,
        tables: OperationTables,
        orders: Orders,
        limit: int,
        rules: Sequence[DispatchRule],
        rng: Random | None,
    ) -> None:
        self.tables, self.orders, self.limit, self.rules, self.rng = tables, orders, limit, rules, rng
        self.done: Orders = [[] for _ in orders]
        self.ends = [-1] * len(tables.lane)
        self.places = positions_in(orders, len(tables.lane))
        self.next = [0] * len(orders)
        microbatches = tables.microbatches
        self.lane = count, _, _ = len(microbatches), microbatches.step, microbatches[-1]
        """Number of operations of a lane, the step between them, and the micro-batch of the last."""
        self.heads = [[lane * count + microbatches[0] for lane in lanes] for lanes in tables.lanes]
        """First operation of each lane that is not known to be done."""
        self.free = list(tables.start_offsets)
        self.held = [0] * len(orders)
        self.woken = list(tables.start_offsets)
        """Time at which each rank looks for an operation again; NEVER until another rank's result arrives."""
        self.events = [(time, rank) for rank, time in enumerate(self.woken)]
        heapify(self.events)

    def run(self) -> None:
        """Schedule each rank's operations in order, and fill gaps where the rank would wait.

        The loop reads local variables only, for speed: a search spends most of its time here.
        """
        tables, ends, free, held, rng = self.tables, self.ends, self.free, self.held, self.rng
        needs, delay, duration, memory_change = (
            tables.needs,
            tables.delay,
            tables.duration,
            tables.memory_change,
        )
        feeds, rank_of = tables.feeds, tables.rank
        events, woken, following, wake, filler = self.events, self.woken, self.next, self._wake, self._filler
        while events:
            now, rank = heappop(events)
            if now != woken[rank]:
                continue
            woken[rank] = NEVER
            start, place, swap_chance = now, following[rank], self.rules[rank].swap_chance
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
                if ready > now or (rng is not None and rng.random() < swap_chance):
                    if now > start and events and events[0][0] < now:
                        wake(rank, now)  # what other ranks do until now may matter
                        break
                    operation = filler(rank, operation, now, ready)
                    if operation < 0:
                        break
                now += duration[operation]
                ends[operation] = free[rank] = now
                held[rank] += memory_change[operation]
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
        """Return the operation to run at time `now`: `following`, or another one in its place; -1 to wait."""
        tables, ends, rule = self.tables, self.ends, self.rules[rank]
        needs, after, memory_change = tables.needs, tables.after, tables.memory_change
        gap, soonest = rule.gap, ready
        if self.rng is not None:
            gap += rule.gap_noise * (self.rng.random() - 0.5)
        choices = []
        for operation in self._heads(rank):
            if operation == following or (after[operation] >= 0 and ends[after[operation]] < 0):
                continue
            need = needs[operation]
            if need >= 0:
                if ends[need] < 0:
                    continue
                start = ends[need] + tables.delay[operation]
                if start > now:
                    soonest = min(soonest, start)
                    continue
            if ready <= now or ready - now >= gap * tables.duration[operation]:
                last = rule.consumed_first and tables.is_last[operation]
                choices.append((last, self.places[operation], operation))
        for _, place, operation in sorted(choices):
            if memory_change[operation] <= 0 or self._has_memory(rank, place):
                return operation
        if ready <= now:
            return following
        if soonest < NEVER:
            self._wake(rank, soonest)
        return -1

    def _heads(self, rank: int) -> list[int]:
        """Return the first unfinished operation of each lane (a stage and kind), and drop finished lanes."""
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

    def _has_memory(self, rank: int, place: int) -> bool:
        """Return whether memory has room for the operation at `place` and all unfinished ones before it."""
        tables, order = self.tables, self.orders[rank]
        held = self.held[rank]
        free = self.limit - tables.memory_change[order[place]]
        if held > free:
            return False
        for operation in order[self.next[rank] : place]:
            if self.ends[operation] < 0:
                held += tables.memory_change[operation]
                if held > free:
                    return False
        return True
