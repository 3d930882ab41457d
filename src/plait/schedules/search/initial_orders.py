"""Initial orders of a search: from named policies, and from building blocks with varied parameters."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

from plait.schedules.action import SPLIT_KINDS
from plait.schedules.building_block import BuildingBlock, Delays, Lengths, build_block
from plait.schedules.event_simulation import event_order
from plait.schedules.named_schedules import policies_for, policy_schedule
from plait.schedules.schedule import Placement
from plait.schedules.search.memory_guard import MemoryGuard
from plait.schedules.search.problem import Orders, Problem, positions_in

PAUSES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 4), (2, 2))
CELLS = (1, 2)
TURNS = (0, 1, 2)
STRETCHES = (0.0, 0.0, 0.125, 0.25)
SHIFTS = ((0, 0.0), (0, 0.5), (1, 0.5), (0, 1.0))
"""Pairs of eager and lazy."""


class BlockParameters(NamedTuple):
    """Parameters of a building block (one micro-batch's actions by time): lengths, period and delays."""

    cells: int
    """Number of cells of an operation of average length. With 1 every operation takes one cell."""
    stretch: float
    """Length of the period beyond the work, as a part of the work."""
    pauses: tuple[int, int]
    """Delay of forwards and of input gradients, in operations; swapped in every second chunk of a v."""
    turns: tuple[int, ...]
    """Delay before each change of chunk and at the last stage, in operations."""


class InitialOrder(NamedTuple):
    """What an initial order is made from: a policy or building block, and changes to it."""

    origin: str | BlockParameters
    """Name of a policy, or parameters of a building block."""
    eager: int = 0
    """Number of micro-batches by which forwards move earlier, where there is memory."""
    lazy: float = 0.0
    """Part of the memory then left that weight gradients take by moving later."""


def initial_orders(problem: Problem, rng: Random) -> Iterator[InitialOrder]:
    """Yield initial orders, without end: named policies, then simple building blocks, then random ones."""
    policies = policies_for(problem.placement, problem.chunks)
    for shift, name in product(SHIFTS, reversed(policies)):
        yield InitialOrder(name, *shift)
    straight = (0,) * (2 * problem.chunks - 1)
    for shift, cells, pauses in product(SHIFTS, CELLS, PAUSES):
        yield InitialOrder(BlockParameters(cells, 0.0, pauses, straight), *shift)
    while True:
        turns = tuple(rng.choice(TURNS) for _ in straight)
        parameters = BlockParameters(rng.choice(CELLS), rng.choice(STRETCHES), rng.choice(PAUSES), turns)
        yield InitialOrder(parameters, *rng.choice(SHIFTS))


def orders_from(problem: Problem, start: InitialOrder) -> Orders:
    """Return each rank's operations in an initial order, changed where they deadlock or exceed memory."""
    if isinstance(start.origin, str):
        made = policy_schedule(start.origin, problem.ranks, problem.microbatches, problem.chunks)
        keys = positions_in(problem.orders_of(made.actions), problem.size)
    else:
        block = block_for(problem, start.origin)  # repeated for each micro-batch
        rows = [row[stage] for stage in range(problem.stages) for row in block.starts]
        keys = [first + number * block.period for first in rows for number in range(problem.microbatches)]
    orders = _within_limit(problem, keys)
    shifted = _shifted(problem, keys, orders, start)
    return orders if shifted == keys else _within_limit(problem, shifted)


def _shifted(problem: Problem, keys: list[int], orders: Orders, start: InitialOrder) -> list[int]:
    """Return sort `keys` with forwards moved earlier and weight gradients later, as far as memory allows."""
    tables, count = problem.tables, problem.microbatches
    latest = max(keys) + 1
    changed = list(keys)
    for stages, order in zip(problem.stages_of, orders, strict=True):
        free = problem.limit - max(accumulate(tables.memory_change[operation] for operation in order))
        taken, kept = (sum(hold[stage] for stage in stages) for hold in problem.memory_costs[1:])
        earlier = min(start.eager, free // taken if taken else count)
        later = int(start.lazy * (free - earlier * taken) / kept) if kept else count
        for stage in stages:
            forward, weight = 3 * stage * count, (3 * stage + 2) * count
            for number in range(count):
                changed[forward + number] = keys[forward + max(number - earlier, 0)]
                last = number + later >= count
                changed[weight + number] = keys[weight + number + (0 if last else later)] + latest * last
    return changed


def _within_limit(problem: Problem, keys: list[int]) -> Orders:
    """Return each rank's operations sorted by `keys`, modified where they deadlock or exceed the limit."""
    tables = problem.tables
    operations = sorted(range(problem.size), key=lambda operation: (keys[operation], operation))
    orders: Orders = [[] for _ in range(problem.ranks)]
    for operation in operations:
        orders[tables.rank[operation]].append(operation)
    runnable = not event_order(problem.actions_of(orders), problem.stages).missing
    held = max(max(accumulate(tables.memory_change[operation] for operation in order)) for order in orders)
    return orders if held <= problem.limit and runnable else admit_in_order(problem, keys)


def block_for(problem: Problem, parameters: BlockParameters) -> BuildingBlock:
    """Return the building block with these parameters, with a period long enough for all actions."""
    cells, lengths = parameters.cells, _lengths(problem, parameters.cells)
    work = max(sum(sum(row[stage] for row in lengths) for stage in stages) for stages in problem.stages_of)
    first, second = (cells * pause for pause in parameters.pauses)
    back = problem.placement is Placement.V
    forward = [second if back and chunk % 2 else first for chunk in range(problem.chunks)]
    backward = [first if back and chunk % 2 else second for chunk in range(problem.chunks)]
    delays = Delays(forward, backward, [cells * turn for turn in parameters.turns])
    period = work + round(parameters.stretch * work)
    while True:
        block = build_block(problem.rank_of, lengths, period, delays)
        if block is not None:
            return block
        period += max(work // 8, 1)


def _lengths(problem: Problem, cells: int) -> Lengths:
    ones = (1,) * problem.stages
    if cells == 1:
        return Lengths(ones, ones, ones)
    rows = [problem.ticks.durations[kind] for kind in SPLIT_KINDS]
    work = max(sum(sum(row[stage] for row in rows) for stage in stages) for stages in problem.stages_of)
    cell = max(work / (3 * problem.chunks * cells), 1e-9)
    return Lengths(*(tuple(max(round(time / cell), 1) for time in row) for row in rows))


def admit_in_order(problem: Problem, keys: list[int]) -> Orders:
    """Return each rank's operations sorted by `keys`, each delayed until it can run and fits into memory."""
    tables, guard, count = problem.tables, MemoryGuard(problem), problem.microbatches
    needs, feeds, after = tables.needs, tables.feeds, tables.after
    orders: Orders = [[] for _ in range(problem.ranks)]
    barred: list[list[tuple[int, int]]] = [[] for _ in orders]
    done, queued = [False] * problem.size, [False] * problem.size
    waiting = [(keys[0], 0)]
    while waiting:
        entry = heappop(waiting)
        operation = entry[1]
        rank = tables.rank[operation]
        if not guard.admits(operation):
            barred[rank].append(entry)
            continue
        guard.take(operation)
        done[operation] = True
        orders[rank].append(operation)
        if barred[rank] and tables.lane[operation] % 3:
            for other in barred[rank]:
                heappush(waiting, other)
            barred[rank].clear()
        following = operation + 1 if (operation + 1) % count else -1
        same_microbatch = -1 if tables.is_last[operation] else operation + count
        for freed in (following, same_microbatch, feeds[operation]):
            if freed < 0 or queued[freed] or (freed % count and not done[freed - 1]):
                continue
            if (after[freed] < 0 or done[after[freed]]) and (needs[freed] < 0 or done[needs[freed]]):
                queued[freed] = True
                heappush(waiting, (keys[freed], freed))
    return orders
