"""Whether there is room: which operations a rank may do so that it never holds too much and never gets stuck.

A forward is let in only if, after it, the oldest micro-batch that still has forwards to do on the rank could
be finished with all younger ones held: nobody younger gives anything back before it is (the banker's
algorithm, Dijkstra 1965, with micro-batches as customers that are served in order).
"""

from __future__ import annotations

from plait.search.problem import Problem


class Room:
    """What every rank holds, and how many operations of each lane are done."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.done = [0] * (3 * problem.stages)
        self.held = [0] * problem.ranks
        self.inside = [0] * problem.ranks
        """What is held for micro-batches whose input gradient is still to come."""
        self._alone = [least_room(problem, rank) for rank in range(problem.ranks)]
        holds = problem.holds
        growth = [
            max(after - before, 0)
            for before, after in zip(holds.until_input, holds.until_weight, strict=True)
        ]
        self._growth = [max(growth[stage] for stage in stages) for stages in problem.stages_of]

    def admits(self, operation: int) -> bool:
        """Whether the operation, whose turn it is in its lane, fits now."""
        problem, view = self.problem, self.problem.ahead
        rank, lane = view.rank[operation], view.lane[operation]
        if self.held[rank] + view.grows[operation] > problem.limit:
            return False
        if lane % 3:
            return True
        until_input = problem.holds.until_input
        inside = self.inside[rank] + until_input[lane // 3]
        if inside + self._growth[rank] > problem.limit:
            return False
        if inside + self._alone[rank] <= problem.limit:
            return True
        forwards = [
            (self.done[3 * stage] + (3 * stage == lane), self.done[3 * stage + 1], until_input[stage])
            for stage in problem.stages_of[rank]
        ]
        oldest = min(begun for begun, _, _ in forwards)
        if oldest == problem.microbatches:
            return True
        younger = sum(
            (begun - max(turned, oldest + 1)) * amount
            for begun, turned, amount in forwards
            if begun > max(turned, oldest + 1)
        )
        return younger + self._alone[rank] <= problem.limit

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
            self.inside[rank] += by * (1 - 2 * (lane % 3)) * self.problem.holds.until_input[lane // 3]


def least_room(problem: Problem, rank: int) -> int:
    """What a rank holds at most if it lets one micro-batch through at a time."""
    until_input, until_weight = problem.holds.until_input, problem.holds.until_weight
    inside = most = sum(until_input[stage] for stage in problem.stages_of[rank])
    for stage in reversed(problem.stages_of[rank]):
        most = max(most, inside + until_weight[stage] - until_input[stage])
        inside -= until_input[stage]
    return most
