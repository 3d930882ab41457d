"""Whether there is room: which operations a rank may do so that it never holds too much and never gets stuck.

A forward is let in only if, after it, the oldest micro-batch that still has forwards to do on the rank could
be finished with all younger ones held: nobody younger gives anything back before it is (the banker's
algorithm, Dijkstra 1965, with micro-batches as customers that are served in order).
"""

from __future__ import annotations

from plait.schedules.search.problem import Problem


class MemoryGuard:
    """What every rank holds, and how many operations of each lane are done."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.done = [0] * (3 * problem.stages)
        self.held = [0] * problem.ranks
        self.inside = [0] * problem.ranks
        """What is held for micro-batches whose input gradient is still to come."""
        self._alone = [_rooms(problem, rank) for rank in range(problem.ranks)]

    def fits(self, operation: int) -> bool:
        """Whether the operation, whose turn it is in its lane, takes no more than there is now."""
        view = self.problem.ahead
        return self.held[view.rank[operation]] + view.grows[operation] <= self.problem.limit

    def admits(self, operation: int) -> bool:
        """Whether it fits, and everything else can be done after it too."""
        view = self.problem.ahead
        lane = view.lane[operation]
        return self.fits(operation) and (lane % 3 > 0 or self._is_safe(view.rank[operation], lane))

    def _is_safe(self, rank: int, lane: int) -> bool:
        """Whether, with one more forward of this lane, one micro-batch after the other can be finished."""
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
        """The operation is done."""
        self._change(operation, 1)

    def give_back(self, operation: int) -> None:
        """The operation, the last that was done in its lane, is undone."""
        self._change(operation, -1)

    def _change(self, operation: int, by: int) -> None:
        view = self.problem.ahead
        rank, lane = view.rank[operation], view.lane[operation]
        self.done[lane] += by
        self.held[rank] += by * view.grows[operation]
        if lane % 3 < 2:
            self.inside[rank] += by * (1 - 2 * (lane % 3)) * self.problem.memory_costs.until_input[lane // 3]


def least_memory(problem: Problem, rank: int) -> int:
    """What a rank holds at most if it lets one micro-batch through at a time."""
    return _rooms(problem, rank)[0]


def _rooms(problem: Problem, rank: int) -> list[int]:
    """What a rank holds at most of a micro-batch of which so many input gradients are done, from 0 on."""
    until_input, until_weight = problem.memory_costs.until_input, problem.memory_costs.until_weight
    inside, most = 0, [0]
    for stage in problem.stages_of[rank]:
        inside += until_input[stage]
        turning = inside + until_weight[stage] - until_input[stage]
        most.append(max(most[-1], inside, turning))
    return most[::-1]
