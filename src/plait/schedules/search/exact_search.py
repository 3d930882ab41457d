"""Exact search of small problems by branch and bound.

Depth first, one operation at a time, on the rank whose next operation could end first (active schedules,
Giffler and Thompson 1960). A forward may also be held back, since it takes memory that another one could
need. A node is pruned when its lower bound is no better than the best known schedule, or when another node
with the same operations done was at no time later.
"""

from __future__ import annotations

from operator import gt
from typing import NamedTuple

from plait.schedules.action import SPLIT_KINDS, Kind
from plait.schedules.search.memory_guard import MemoryGuard
from plait.schedules.search.problem import Orders, Problem


class SearchResult(NamedTuple):
    """Result of an exact search: the shortest schedule found, whether it is optimal, nodes visited."""

    orders: Orders | None
    """Orders of the shortest schedule found, or None where none is shorter than the known one."""
    proven: bool
    """Whether no schedule is shorter still."""
    nodes: int
    """Number of nodes that were visited."""


class NextOperation(NamedTuple):
    """An operation that a rank could run next in the search, with its start and end time."""

    end: int
    start: int
    operation: int


def exact_search(problem: Problem, known: int, nodes: int) -> SearchResult:
    """Search by branch and bound for schedules shorter than `known`; visit at most `nodes` tree nodes."""
    search = _Search(problem, known, nodes)
    try:
        search.descend()
    except _BudgetExceeded:
        return SearchResult(search.found, False, nodes)
    return SearchResult(search.found, True, nodes - search.nodes)


class _BudgetExceeded(Exception):
    """Raised when the allowed number of nodes has been visited."""


class _Search:
    """A depth-first search: the state at the current node, changed on descent and restored on return."""

    def __init__(self, problem: Problem, known: int, nodes: int) -> None:
        self.problem, self.tables = problem, problem.tables
        self.best, self.nodes = known, nodes
        self.found: Orders | None = None
        self.guard = MemoryGuard(problem)
        # Where an input gradient takes memory, `admits` would rule out some legal schedules.
        takes_memory = any(map(gt, problem.memory_costs.until_weight, problem.memory_costs.until_input))
        self.has_memory = self.guard.fits if takes_memory else self.guard.admits
        self.ends = [-1] * problem.size
        self.free = list(self.tables.start_offsets)
        self.path: list[int] = []
        self.held_back: list[frozenset[int]] = [frozenset()] * problem.ranks
        self.seen: dict[tuple[object, ...], list[list[int]]] = {}
        durations = problem.ticks.durations
        self.work = [
            problem.microbatches
            * sum(durations[Kind.F][stage] + durations[Kind.B][stage] for stage in stages)
            for stages in problem.stages_of
        ]
        self.tails = _tails(problem)

    def descend(self) -> None:
        """Search the subtree of the current node (partial schedule) of the search tree."""
        self.nodes -= 1
        if self.nodes < 0:
            raise _BudgetExceeded
        if min(self.guard.done) == self.problem.microbatches:
            self.best = max(map(int.__add__, self.free, self.tables.end_offsets))
            self.found = [[] for _ in self.free]
            for operation in self.path:
                self.found[self.tables.rank[operation]].append(operation)
            return
        choices = min(filter(None, map(self._choices, range(self.problem.ranks))), default=None)
        if choices is None:
            return
        first = choices[0]
        for choice in choices:
            if choice.start < first.end or choice is first:
                self._try(choice)
        if self.tables.memory_change[first.operation] > 0:
            rank = self.tables.rank[first.operation]
            before = self.held_back[rank]
            self.held_back[rank] = before | {first.operation}
            self.descend()
            self.held_back[rank] = before

    def _choices(self, rank: int) -> list[NextOperation]:
        """Return the operations that a rank could run next, ordered by their end."""
        tables, count, free = self.tables, self.problem.microbatches, self.free[rank]
        choices = []
        for stage in self.problem.stages_of[rank]:
            for lane in (3 * stage, 3 * stage + 1, 3 * stage + 2):
                number = self.guard.done[lane]
                operation = lane * count + number
                if number == count or (lane % 3 and self.guard.done[lane - 1] <= number):
                    continue
                need = tables.needs[operation]
                if need >= 0 and self.ends[need] < 0:
                    continue
                if operation in self.held_back[rank] or not self.has_memory(operation):
                    continue
                start = free if need < 0 else max(free, self.ends[need] + tables.delay[operation])
                choices.append(NextOperation(start + tables.duration[operation], start, operation))
        return sorted(choices)

    def _try(self, choice: NextOperation) -> None:
        operation, rank = choice.operation, self.tables.rank[choice.operation]
        before = self.free[rank], self.held_back[rank]
        self.ends[operation] = self.free[rank] = choice.end
        self.held_back[rank] = frozenset()
        self.work[rank] -= self.tables.duration[operation]
        self.guard.take(operation)
        self.path.append(operation)
        if self._bound() < self.best and not self._is_dominated():
            self.descend()
        self.path.pop()
        self.guard.undo(operation)
        self.work[rank] += self.tables.duration[operation]
        self.free[rank], self.held_back[rank] = before
        self.ends[operation] = -1

    def _arrivals(self) -> list[tuple[int, int]]:
        """Return the forwards and input gradients whose input is ready, with their earliest start."""
        tables, count = self.tables, self.problem.microbatches
        arrivals = []
        for lane, number in enumerate(self.guard.done):
            if lane % 3 == 2:
                continue
            free = self.free[tables.rank[lane * count]]
            for operation in range(lane * count + number, (lane + 1) * count):
                need = tables.needs[operation]
                if need >= 0 and self.ends[need] < 0:
                    break
                start = free if need < 0 else max(free, self.ends[need] + tables.delay[operation])
                arrivals.append((operation, start))
        return arrivals

    def _bound(self) -> int:
        ranks = zip(self.free, self.work, self.tables.end_offsets, strict=True)
        bound = max(free + work + late for free, work, late in ranks)
        lanes = self.tables.lane
        return max([bound, *(start + self.tails[lanes[operation]] for operation, start in self._arrivals())])

    def _is_dominated(self) -> bool:
        times = [*self.free, *(start for _, start in self._arrivals())]
        others = self.seen.setdefault((tuple(self.guard.done), *self.held_back), [])
        if any(all(map(int.__le__, other, times)) for other in others):
            return True
        others[:] = [other for other in others if not all(map(int.__le__, times, other))]
        others.append(times)
        return False


def _tails(problem: Problem) -> list[int]:
    """Return for each stage and kind the least time from an operation's start to its micro-batch's end."""
    forwards, inputs, weights = (problem.ticks.durations[kind] for kind in SPLIT_KINDS)
    tails = [0] * (3 * problem.stages)
    for stage in range(problem.stages):
        rest = problem.hops[stage - 1] + tails[3 * stage - 2] if stage else 0
        tails[3 * stage + 2] = weights[stage]
        tails[3 * stage + 1] = inputs[stage] + max(weights[stage], rest)
    tails[-3] = forwards[-1] + tails[-2]
    for stage in range(problem.stages - 2, -1, -1):
        tails[3 * stage] = forwards[stage] + problem.hops[stage] + tails[3 * stage + 3]
    return tails
