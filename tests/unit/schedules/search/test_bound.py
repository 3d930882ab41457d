from __future__ import annotations

import pytest
from hypothesis import given, settings
from search_cases import LINEAR, LOOP, TINY, V, problem_of, problems, shortest

from plait.schedules.costs import Costs
from plait.schedules.search.limits import lower_bound
from plait.schedules.search.local_search import local_search
from plait.schedules.search.problem import Problem, StageLayout

WHOLE = Costs(2, 4, 6, comm=5)
"""Ticks of 1 with two chunks a rank."""


@pytest.mark.parametrize(
    ("layout", "ranks", "microbatches", "costs", "bound"),
    [
        (LINEAR, 1, 5, Costs(1, 2, 4), 35),  # its work
        (LINEAR, 4, 1, Costs(1, 2, 4), 4 + 8 + 4),  # the way of one micro-batch, with the last W
        (LINEAR, 4, 1, Costs(1, 2, 4, comm=3), 4 + 8 + 4 + 6 * 3),
        (V, 2, 1, WHOLE, 4 + 8 + 3 + 4 * 5),  # no hop in the middle
        (LOOP, 2, 1, WHOLE, 4 + 8 + 3 + 6 * 5),
        (LINEAR, 4, 8, Costs(), 24 + 3),  # rank 3 starts last, and as long as it takes to drain it has W
        (LINEAR, 4, 8, Costs(2, 2, 1), 40 + 6),  # rank 3 starts at 6
        (LINEAR, 4, 8, Costs(1, 1, 0), 16 + 3 + 3),  # and there is nothing to do while it is drained
    ],
)
def test_the_lower_bound_of_known_pipelines_is_the_listed_one(
    layout: StageLayout, ranks: int, microbatches: int, costs: Costs, bound: int
) -> None:
    problem = problem_of(layout, ranks, microbatches, costs, limit=1000)
    assert problem.measure(lower_bound(problem)) == bound


@pytest.mark.parametrize(
    ("limit", "bound"),
    [
        (4, 24 + 3),
        (3, 24 + 4),  # rank 0 waits 7 for its first input gradient, and has room for 3 forwards until then
        (2, 8 * 9 / 2),  # there, a micro-batch takes its place for 9
        (1, 8 * 9),
    ],
)
def test_the_lower_bound_grows_as_the_memory_limit_falls(limit: int, bound: int) -> None:
    assert lower_bound(problem_of(LINEAR, 4, 8, limit=limit)) == bound


def test_the_lower_bound_of_a_span_does_not_count_late_starts() -> None:
    problem = problem_of(LINEAR, 4, 8, limit=7, of_span=True)
    assert problem.measure(lower_bound(problem)) == 24


def test_the_lower_bound_with_instant_forwards_uses_their_memory_last() -> None:
    costs = Costs([0, 1], 0, 2, comm=1, until_I=[3, 3], until_W=[1, 1])
    problem = problem_of(V, 1, 2, costs, limit=7)
    assert shortest(problem) == lower_bound(problem) == 6


@settings(max_examples=100)
@given(problems(TINY))
def test_no_schedule_is_shorter_than_the_bound(problem: Problem) -> None:
    best = shortest(problem)
    assert best is not None
    assert problem.measure(lower_bound(problem)) <= best * problem.ticks.tick


@settings(max_examples=20)
@given(problems())
def test_no_found_schedule_is_shorter_than_the_lower_bound(problem: Problem) -> None:
    assert all(candidate.timed.length >= lower_bound(problem) for candidate in local_search([problem], 1))
