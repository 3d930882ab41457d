"""A search problem: a pipeline as integer tables, indexed by operations that are integers themselves.

Operation `(3 * stage + kind) * microbatches + microbatch` is the forward (kind 0), input gradient (1) or
weight gradient (2) of a micro-batch on a stage. Operations of the same stage and kind are a *lane*; its
micro-batches run in order. A full backward is an input gradient directly followed by its weight gradient.

Every problem has a mirror image: time runs backwards, weight gradients come first and forwards last, and
memory grows where it shrank. So a method that improves schedules from the front also improves the back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import NamedTuple, TypeAlias

from plait.schedules.action import SPLIT_KINDS, Action, Kind
from plait.schedules.costs import MemoryCosts, Ticks
from plait.schedules.schedule import Placement, stages_by_rank

StageLayout: TypeAlias = tuple[Placement, int]
"""Placement of stages, and their number per rank."""
Orders: TypeAlias = list[list[int]]
"""Per rank, its operations in order."""


class OperationTables(NamedTuple):
    """Properties of each operation of a search problem, as lists of integers; -1 means none."""

    duration: Sequence[int]
    rank: Sequence[int]
    needs: Sequence[int]
    """The operation whose result it needs, on another stage or, for the last input gradient, the forward."""
    feeds: Sequence[int]
    """The operation that needs its result: the inverse of `needs`."""
    delay: Sequence[int]
    """Least time from the end of the operation in `needs` to its start."""
    after: Sequence[int]
    """The operation of its own stage and micro-batch that must run before it."""
    lane: Sequence[int]
    lanes: Sequence[Sequence[int]]
    """Per rank: the lanes of its stages."""
    microbatches: range
    """Micro-batches, in the order in which each lane runs them."""
    memory_change: Sequence[int]
    """Change of its rank's memory from its start on."""
    is_last: Sequence[bool]
    """Whether it is the last of its stage and micro-batch, so that no other operation needs it."""
    start_offsets: Sequence[int]
    """Per rank: earliest start."""
    end_offsets: Sequence[int]
    """Per rank: added to its end where schedules are compared."""


@dataclass(frozen=True)
class Problem:
    """A search problem: a pipeline of stages on ranks, its micro-batches, their costs, and a memory limit."""

    placement: Placement
    ranks: int
    chunks: int
    microbatches: int
    ticks: Ticks
    memory_costs: MemoryCosts
    limit: int
    """Largest memory of a rank, in units of `memory_costs`."""
    of_span: bool = False
    """Whether the span is minimised (from each rank's own first start), not the makespan."""

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.placement.rank_of(self.ranks, self.chunks)

    @property
    def layout(self) -> StageLayout:
        """The placement of stages on ranks, and the number of stages per rank."""
        return self.placement, self.chunks

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.rank_of)

    @property
    def size(self) -> int:
        """Number of operations of all ranks: `F`, `I` and `W` of each micro-batch on each stage."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in model order."""
        return stages_by_rank(self.rank_of, self.ranks)

    @cached_property
    def first_starts(self) -> tuple[int, ...]:
        """The earliest tick at which each stage's first forward can start."""
        starts, forwards = [0], self.ticks.durations[Kind.F]
        for stage, hop in enumerate(self.hops):
            starts.append(starts[-1] + forwards[stage] + hop)
        return tuple(starts)

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """Time of a message from each stage to the next, in ticks."""
        return tuple(self.ticks.timing(self.rank_of).forward_hops[1:])

    @cached_property
    def head_starts(self) -> tuple[int, ...]:
        """The tick from which each rank's time counts: 0, or its earliest start if spans are searched."""
        if not self.of_span:
            return (0,) * self.ranks
        return tuple(min(self.first_starts[stage] for stage in stages) for stages in self.stages_of)

    def measure(self, length: int) -> Fraction:
        """Return the makespan or span that a schedule of this length in ticks has, in the costs' unit."""
        return (length - max(self.head_starts)) * self.ticks.tick

    def length(self, measure: Fraction) -> int:
        """Return the ticks of a makespan or span, rounded up: the inverse of `measure`."""
        return ceil(measure / self.ticks.tick) + max(self.head_starts)

    @cached_property
    def tables(self) -> OperationTables:
        """Duration, rank and dependencies of each operation, as lists by operation; computed once."""
        return _tables(self)

    @cached_property
    def mirrored_tables(self) -> OperationTables:
        """`tables` with time reversed: dependencies point to the operations that needed the result."""
        return _mirror(self.tables)

    def orders_of(self, rows: Iterable[Iterable[Action]]) -> Orders:
        """Convert the `Action`s of `rows`, one row per rank, to integer operations, and return the orders."""
        count = self.microbatches
        orders: Orders = []
        for row in rows:
            order: list[int] = []
            for stage, kind, microbatch in row:
                first = 3 * stage * count + microbatch
                if kind is Kind.B:
                    order += (first + count, first + 2 * count)
                else:
                    order.append(first + SPLIT_KINDS.index(kind) * count)
            orders.append(order)
        return orders

    def actions_of(self, orders: Orders) -> tuple[tuple[Action, ...], ...]:
        """Convert each rank's order of integer operations to `Action`s, and return the orders."""
        lanes = [(stage, kind) for stage in range(self.stages) for kind in SPLIT_KINDS]
        count = self.microbatches
        return tuple(
            tuple(Action(*lanes[operation // count], operation % count) for operation in order)
            for order in orders
        )


def positions_in(orders: Orders, size: int) -> list[int]:
    """Return for each of `size` operations its position in its rank's order."""
    positions = [0] * size
    for order in orders:
        for position, operation in enumerate(order):
            positions[operation] = position
    return positions


def _tables(problem: Problem) -> OperationTables:
    count, size = problem.microbatches, problem.size
    lanes = [operation // count for operation in range(size)]
    durations = [problem.ticks.durations[kind] for kind in SPLIT_KINDS]
    needs, feeds, delay = [-1] * size, [-1] * size, [0] * size
    last = 3 * (problem.stages - 1) * count

    def join(first: int, second: int, hop: int) -> None:
        for microbatch in range(count):
            feeds[first + microbatch], needs[second + microbatch] = second + microbatch, first + microbatch
            delay[second + microbatch] = hop

    for stage, hop in enumerate(problem.hops):
        here, there = 3 * stage * count, 3 * (stage + 1) * count
        join(here, there, hop)
        join(there + count, here + count, hop)
    join(last, last + count, 0)
    until_input, until_weight = problem.memory_costs.until_input, problem.memory_costs.until_weight
    memory_change = [
        change
        for taken, kept in zip(until_input, until_weight, strict=True)
        for change in (taken, kept - taken, -kept)
    ]
    latest = max(problem.head_starts)
    return OperationTables(
        duration=[durations[lane % 3][lane // 3] for lane in lanes],
        rank=[problem.rank_of[lane // 3] for lane in lanes],
        needs=needs,
        feeds=feeds,
        delay=delay,
        after=[operation - count if lane % 3 else -1 for operation, lane in enumerate(lanes)],
        lane=lanes,
        lanes=[[3 * stage + kind for stage in stages for kind in range(3)] for stages in problem.stages_of],
        microbatches=range(count),
        memory_change=[memory_change[lane] for lane in lanes],
        is_last=[lane % 3 == 2 for lane in lanes],
        start_offsets=[0] * problem.ranks,
        end_offsets=[latest - start for start in problem.head_starts],
    )


def _mirror(tables: OperationTables) -> OperationTables:
    count = len(tables.microbatches)
    return tables._replace(
        microbatches=tables.microbatches[::-1],
        needs=tables.feeds,
        feeds=tables.needs,
        delay=[tables.delay[follower] if follower >= 0 else 0 for follower in tables.feeds],
        after=[operation + count if lane % 3 < 2 else -1 for operation, lane in enumerate(tables.lane)],
        memory_change=[-change for change in tables.memory_change],
        is_last=[lane % 3 == 0 for lane in tables.lane],
        start_offsets=tables.end_offsets,
        end_offsets=tables.start_offsets,
    )
