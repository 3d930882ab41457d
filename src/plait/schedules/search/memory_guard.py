"""`MemoryGuard`: the operations that a rank may run within its memory limit, without causing a deadlock.

A forward is admitted only if, after it, the oldest micro-batch with forwards left on the rank could still be
finished while all younger ones are held: a younger one frees no memory before that (the banker's algorithm,
Dijkstra 1965, with micro-batches as customers that are served in order).
"""

from __future__ import annotations

from plait.schedules.search.problem import Problem


class MemoryGuard:
    """Decides which operations a rank may run within its memory limit and without causing a deadlock."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.done = [0] * (3 * problem.stages)
        self.held = [0] * problem.ranks
        self.inside = [0] * problem.ranks
        """Memory of micro-batches whose input gradient is not done."""
        self._alone = [_microbatch_peaks(problem, rank) for rank in range(problem.ranks)]

    def fits(self, operation: int) -> bool:
        """Return whether `operation`, the next of its stage and kind, fits into its rank's free memory."""
        tables = self.problem.tables
        return self.held[tables.rank[operation]] + tables.memory_change[operation] <= self.problem.limit

    def admits(self, operation: int) -> bool:
        """Return whether `operation` fits into memory now and leaves room for all others later."""
        tables = self.problem.tables
        lane = tables.lane[operation]
        return self.fits(operation) and (lane % 3 > 0 or self._is_safe(tables.rank[operation], lane))

    def _is_safe(self, rank: int, lane: int) -> bool:
        """Return whether all micro-batches can finish one by one after a forward on the stage `lane // 3`."""
        alone, stages = self._alone[rank], self.problem.stages_of[rank]
        limit, until_input = self.problem.limit, self.problem.memory_costs.until_input
        if self.inside[rank] + until_input[lane // 3] + alone[0] <= limit:
            return True
        begun = [self.done[3 * stage] + (3 * stage == lane) for stage in stages]
        turned = [self.done[3 * stage + 1] for stage in stages]

        def younger(than: int) -> int:
            return sum(
                max(first - max(second, than + 1), 0) * until_input[stage]
                for first, second, stage in zip(begun, turned, stages, strict=True)
            )

        return all(
            younger(number) + alone[sum(count > number for count in turned)] <= limit
            for number in range(min(turned), max(turned) + 1)
        )

    def take(self, operation: int) -> None:
        """Mark `operation`, the next of its stage and kind, as finished, and count its memory."""
        self._change(operation, 1)

    def undo(self, operation: int) -> None:
        """Undo `take` of `operation`, the last finished one of its stage and kind."""
        self._change(operation, -1)

    def _change(self, operation: int, by: int) -> None:
        tables = self.problem.tables
        rank, lane = tables.rank[operation], tables.lane[operation]
        self.done[lane] += by
        self.held[rank] += by * tables.memory_change[operation]
        if lane % 3 < 2:
            self.inside[rank] += by * (1 - 2 * (lane % 3)) * self.problem.memory_costs.until_input[lane // 3]


def least_memory(problem: Problem, rank: int) -> int:
    """Return the peak activation memory of a rank that runs one micro-batch at a time: the least possible."""
    return _microbatch_peaks(problem, rank)[0]


def _microbatch_peaks(problem: Problem, rank: int) -> list[int]:
    """Return a micro-batch's peak memory on `rank` after it has run 0, 1, … of its input gradients there."""
    until_input, until_weight = problem.memory_costs.until_input, problem.memory_costs.until_weight
    inside, most = 0, [0]
    for stage in problem.stages_of[rank]:
        inside += until_input[stage]
        turning = inside + until_weight[stage] - until_input[stage]
        most.append(max(most[-1], inside, turning))
    return most[::-1]
