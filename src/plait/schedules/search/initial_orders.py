"""Where a search starts: orders that can be run, from named policies and from patterns of many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

from plait.schedules.action import Kind
from plait.schedules.building_block import BuildingBlock, Delays, Lengths, build_block
from plait.schedules.policies import policies_for, policy_schedule
from plait.schedules.schedule import Placement
from plait.schedules.search.memory_guard import MemoryGuard
from plait.schedules.search.problem import Orders, Problem


class BlockParameters(NamedTuple):
    """What a pattern is made from."""

    cells: int
    """Cells of an operation of average length. With 1 all take one, whatever they cost."""
    stretch: float
    """By which part of the work the period is longer than it."""
    pauses: tuple[int, int]
    """Lengths of operations by which forwards and input gradients are held up; in every second chunk of a v,
    the other way round."""
    turns: tuple[int, ...]
    """Likewise, before each change of chunk and at the last stage."""


class InitialOrder(NamedTuple):
    """Where to start from."""

    origin: str | BlockParameters
    """The name of a policy, or the shape of a pattern."""
    eager: int = 0
    """By how many micro-batches forwards come earlier, where there is room."""
    lazy: float = 0.0
    """Which part of the room that is left weight gradients take up by coming later."""


PAUSES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 4), (2, 2))
CELLS = (1, 2)
TURNS = (0, 1, 2)
STRETCHES = (0.0, 0.0, 0.125, 0.25)
TEMPERS = ((0, 0.0), (0, 0.5), (1, 0.5), (0, 1.0))
"""Eager and lazy."""


def initial_orders(problem: Problem, chance: Random) -> Iterator[InitialOrder]:
    """Policies that have the problem's stages, then patterns, the plain ones first; without end."""
    policies = policies_for(problem.placement, problem.chunks)
    for temper, name in product(TEMPERS, reversed(policies)):
        yield InitialOrder(name, *temper)
    straight = (0,) * (2 * problem.chunks - 1)
    for temper, cells, pauses in product(TEMPERS, CELLS, PAUSES):
        yield InitialOrder(BlockParameters(cells, 0.0, pauses, straight), *temper)
    while True:
        turns = tuple(chance.choice(TURNS) for _ in straight)
        shape = BlockParameters(chance.choice(CELLS), chance.choice(STRETCHES), chance.choice(PAUSES), turns)
        yield InitialOrder(shape, *chance.choice(TEMPERS))


def orders_from(problem: Problem, start: InitialOrder) -> Orders:
    """The start's orders, mended where they cannot be run or hold more than the problem's limit."""
    if isinstance(start.origin, str):
        rows = policy_schedule(start.origin, problem.ranks, problem.microbatches, problem.chunks).actions
        keys = _places(problem.orders_of(rows), problem.size)
    else:
        keys = _times(problem, block_for(problem, start.origin))
    orders = _within_limit(problem, keys)
    tempered = _shifted(problem, keys, orders, start)
    return orders if tempered == keys else _within_limit(problem, tempered)


def _shifted(problem: Problem, keys: list[int], orders: Orders, start: InitialOrder) -> list[int]:
    """`keys` with forwards earlier and weight gradients later, as far as `orders` leave room for it."""
    view, count = problem.ahead, problem.microbatches
    latest = max(keys) + 1
    changed = list(keys)
    for stages, order in zip(problem.stages_of, orders, strict=True):
        room = problem.limit - max(accumulate(view.grows[operation] for operation in order))
        taken, kept = (sum(hold[stage] for stage in stages) for hold in problem.memory_costs[1:])
        earlier = min(start.eager, room // taken if taken else count)
        later = int(start.lazy * (room - earlier * taken) / kept) if kept else count
        for stage in stages:
            forward, weight = 3 * stage * count, (3 * stage + 2) * count
            for number in range(count):
                changed[forward + number] = keys[forward + max(number - earlier, 0)]
                last = number + later >= count
                changed[weight + number] = keys[weight + number + (0 if last else later)] + latest * last
    return changed


def _within_limit(problem: Problem, keys: list[int]) -> Orders:
    """Orders by `keys`, or where they hold too much what comes next to them."""
    view = problem.ahead
    operations = sorted(range(problem.size), key=lambda operation: (keys[operation], operation))
    orders: Orders = [[] for _ in range(problem.ranks)]
    for operation in operations:
        orders[view.rank[operation]].append(operation)
    held = max(max(accumulate(view.grows[operation] for operation in order)) for order in orders)
    return orders if held <= problem.limit and _can_run(problem, orders) else admit_in_order(problem, keys)


def _can_run(problem: Problem, orders: Orders) -> bool:
    """Whether nobody waits for ever: where ranks have room for different numbers of forwards, they might."""
    needs, done = problem.ahead.needs, [False] * problem.size
    waiting = [iter(order) for order in orders]
    heads = [next(order) for order in waiting]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(waiting):
            while heads[rank] >= 0 and (needs[heads[rank]] < 0 or done[needs[heads[rank]]]):
                done[heads[rank]] = moved = True
                heads[rank] = next(order, -1)
    return all(done)


def block_for(problem: Problem, shape: BlockParameters) -> BuildingBlock:
    """The pattern of `shape` with the shortest period at which it fits."""
    cells, lengths = shape.cells, _lengths(problem, shape.cells)
    work = max(sum(sum(row[stage] for row in lengths) for stage in stages) for stages in problem.stages_of)
    here, there = (cells * pause for pause in shape.pauses)
    back = problem.placement is Placement.V
    forward = [there if back and chunk % 2 else here for chunk in range(problem.chunks)]
    backward = [here if back and chunk % 2 else there for chunk in range(problem.chunks)]
    delays = Delays(forward, backward, [cells * turn for turn in shape.turns])
    period = work + round(shape.stretch * work)
    while True:
        pattern = build_block(problem.rank_of, lengths, period, delays)
        if pattern is not None:
            return pattern
        period += max(work // 8, 1)


def _lengths(problem: Problem, cells: int) -> Lengths:
    ones = (1,) * problem.stages
    if cells == 1:
        return Lengths(ones, ones, ones)
    rows = [problem.ticks.durations[kind] for kind in (Kind.F, Kind.I, Kind.W)]
    work = max(sum(sum(row[stage] for row in rows) for stage in stages) for stages in problem.stages_of)
    cell = max(work / (3 * problem.chunks * cells), 1e-9)
    return Lengths(*(tuple(max(round(time / cell), 1) for time in row) for row in rows))


def _times(problem: Problem, pattern: BuildingBlock) -> list[int]:
    """When each operation initial_orders in a pattern."""
    rows = [row[stage] for stage in range(problem.stages) for row in pattern.starts]
    return [start + number * pattern.period for start in rows for number in range(problem.microbatches)]


def _places(orders: Orders, size: int) -> list[int]:
    """Where each operation stands in its rank's order."""
    places = [0] * size
    for order in orders:
        for place, operation in enumerate(order):
            places[operation] = place
    return places


def admit_in_order(problem: Problem, keys: list[int]) -> Orders:
    """All operations by `keys`, each where it can be run and where there is room for it."""
    view, room, count = problem.ahead, MemoryGuard(problem), problem.microbatches
    needs, feeds, after = view.needs, view.feeds, view.after
    orders: Orders = [[] for _ in range(problem.ranks)]
    barred: list[list[tuple[int, int]]] = [[] for _ in orders]
    done, queued = [False] * problem.size, [False] * problem.size
    waiting = [(keys[0], 0)]
    while waiting:
        entry = heappop(waiting)
        operation = entry[1]
        rank = view.rank[operation]
        if not room.admits(operation):
            barred[rank].append(entry)
            continue
        room.take(operation)
        done[operation] = True
        orders[rank].append(operation)
        if barred[rank] and view.lane[operation] % 3:
            for other in barred[rank]:
                heappush(waiting, other)
            barred[rank].clear()
        following = operation + 1 if (operation + 1) % count else -1
        behind = -1 if view.spare[operation] else operation + count
        for freed in (following, behind, feeds[operation]):
            if freed < 0 or queued[freed] or (freed % count and not done[freed - 1]):
                continue
            if (after[freed] < 0 or done[after[freed]]) and (needs[freed] < 0 or done[needs[freed]]):
                queued[freed] = True
                heappush(waiting, (keys[freed], freed))
    return orders
