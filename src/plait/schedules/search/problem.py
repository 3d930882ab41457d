"""What is searched: a pipeline as tables of whole numbers, over operations that are numbers themselves.

Operation `(3 * stage + kind) * microbatches + microbatch` is the forward (kind 0), input gradient (1) or
weight gradient (2) of a micro-batch on a stage. What has the same stage and kind is a *lane*; its
micro-batches go in order. A full backward is an input gradient with its weight gradient right behind it.

Every problem has a mirror image: time runs backwards, weight gradients come first and forwards last, and
what is held grows where it shrank. A way to improve schedules from the front improves them from the back too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import NamedTuple, TypeAlias

from plait.schedules.action import Action, Kind
from plait.schedules.memory import MemoryCosts
from plait.schedules.schedule import Placement
from plait.schedules.simulation.costs import Ticks

KINDS = (Kind.F, Kind.I, Kind.W)
Layout: TypeAlias = tuple[Placement, int]
"""Where stages live, and how many on each rank."""
Orders: TypeAlias = list[list[int]]
"""Per rank, its operations in order."""


class View(NamedTuple):
    """A problem as it is, or its mirror image. What is not said otherwise is per operation; -1 is none."""

    duration: Sequence[int]
    rank: Sequence[int]
    needs: Sequence[int]
    """The operation whose result it starts from, on another stage or, at the last one, the forward."""
    feeds: Sequence[int]
    """The operation that starts from its result."""
    delay: Sequence[int]
    """From the end of what it needs to its own start."""
    after: Sequence[int]
    """The operation of its own stage and micro-batch that has to be done before."""
    lane: Sequence[int]
    lanes: Sequence[Sequence[int]]
    """Per rank: the lanes of its stages."""
    microbatches: range
    """In the order in which a lane takes them."""
    grows: Sequence[int]
    """By how much more its rank holds from then on."""
    spare: Sequence[bool]
    """Whether it is the last of its stage and micro-batch: nothing else waits for it."""
    opens: Sequence[int]
    """Per rank: when it may start."""
    closes: Sequence[int]
    """Per rank: how much its end counts for more than the others'."""


@dataclass(frozen=True)
class Problem:
    """A pipeline of stages on ranks, micro-batches to run through it, and what they cost."""

    placement: Placement
    ranks: int
    chunks: int
    microbatches: int
    ticks: Ticks
    memory_costs: MemoryCosts
    limit: int
    """The most that a rank may hold, in units of `holds`."""
    of_span: bool = False
    """Whether each rank's time counts from its own first start, not from the first of all."""

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.placement.rank_of(self.ranks, self.chunks)

    @property
    def layout(self) -> Layout:
        """What tells it from other ways to lay out the same pipeline."""
        return self.placement, self.chunks

    @property
    def stages(self) -> int:
        """Stages over all ranks."""
        return len(self.rank_of)

    @property
    def size(self) -> int:
        """How many operations there are."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its stages in model order."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)
            for rank in range(self.ranks)
        )

    @cached_property
    def first_starts(self) -> tuple[int, ...]:
        """Per stage: the earliest start of its first forward."""
        starts, forwards = [0], self.ticks.durations[Kind.F]
        for stage, hop in enumerate(self.hops):
            starts.append(starts[-1] + forwards[stage] + hop)
        return tuple(starts)

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """From each stage to the next."""
        return tuple(self.ticks.timing(self.rank_of).forward_hops[1:])

    @cached_property
    def head_starts(self) -> tuple[int, ...]:
        """Per rank: by how much less its end counts, because it starts later."""
        if not self.of_span:
            return (0,) * self.ranks
        return tuple(min(self.first_starts[stage] for stage in stages) for stages in self.stages_of)

    def measure(self, length: int) -> Fraction:
        """What is minimised, makespan or span, of a schedule that settles in so many ticks."""
        return (length - max(self.head_starts)) * self.ticks.tick

    def length(self, measure: Fraction) -> int:
        """The least number of ticks in which what settles measures no less: the inverse of `measure`."""
        return ceil(measure / self.ticks.tick) + max(self.head_starts)

    @cached_property
    def ahead(self) -> View:
        """The problem as it is."""
        return _view(self)

    @cached_property
    def mirrored(self) -> View:
        """Its mirror image."""
        return _mirror(self.ahead)

    def shortened(self, microbatches: int) -> Problem:
        """The same for fewer micro-batches."""
        return replace(self, microbatches=microbatches)

    def orders_of(self, rows: Iterable[Iterable[Action]]) -> Orders:
        """Actions as operations."""
        count = self.microbatches
        orders: Orders = []
        for row in rows:
            order: list[int] = []
            for stage, kind, microbatch in row:
                first = 3 * stage * count + microbatch
                if kind is Kind.B:
                    order += (first + count, first + 2 * count)
                else:
                    order.append(first + KINDS.index(kind) * count)
            orders.append(order)
        return orders

    def actions_of(self, orders: Orders) -> list[list[Action]]:
        """Operations as actions."""
        return [[self._action(operation) for operation in order] for order in orders]

    def _action(self, operation: int) -> Action:
        lane, microbatch = divmod(operation, self.microbatches)
        stage, kind = divmod(lane, 3)
        return Action(stage, KINDS[kind], microbatch)


def _view(problem: Problem) -> View:
    count, size = problem.microbatches, problem.size
    lanes = [operation // count for operation in range(size)]
    durations = [problem.ticks.durations[kind] for kind in KINDS]
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
    grows = [
        change
        for taken, kept in zip(until_input, until_weight, strict=True)
        for change in (taken, kept - taken, -kept)
    ]
    latest = max(problem.head_starts)
    return View(
        duration=[durations[lane % 3][lane // 3] for lane in lanes],
        rank=[problem.rank_of[lane // 3] for lane in lanes],
        needs=needs,
        feeds=feeds,
        delay=delay,
        after=[operation - count if lane % 3 else -1 for operation, lane in enumerate(lanes)],
        lane=lanes,
        lanes=[[3 * stage + kind for stage in stages for kind in range(3)] for stages in problem.stages_of],
        microbatches=range(count),
        grows=[grows[lane] for lane in lanes],
        spare=[lane % 3 == 2 for lane in lanes],
        opens=[0] * problem.ranks,
        closes=[latest - start for start in problem.head_starts],
    )


def _mirror(view: View) -> View:
    count = len(view.microbatches)
    return view._replace(
        microbatches=view.microbatches[::-1],
        needs=view.feeds,
        feeds=view.needs,
        delay=[view.delay[follower] if follower >= 0 else 0 for follower in view.feeds],
        after=[operation + count if lane % 3 < 2 else -1 for operation, lane in enumerate(view.lane)],
        grows=[-change for change in view.grows],
        spare=[lane % 3 == 0 for lane in view.lane],
        opens=view.closes,
        closes=view.opens,
    )
