from __future__ import annotations

import pytest
from hypothesis import given
from search_cases import (
    LINEAR,
    LOOP,
    ROOMY,
    TINY,
    V,
    operations,
    problem_of,
    problems,
    require_legal,
    schedule_of,
    shortest,
    words,
)

from plait.schedules.costs import Costs
from plait.schedules.search.exact_search import SearchResult, exact_search
from plait.schedules.search.list_scheduling import DispatchRule, list_schedule
from plait.schedules.search.problem import Problem, StageLayout

ENOUGH = 20_000


def length_of(problem: Problem, found: SearchResult) -> int | None:
    """What is measured of the schedule that was found, in ticks."""
    if found.orders is None:
        return None
    require_legal(problem, found.orders)
    # Without gaps to fill, list scheduling is event simulation.
    timed = list_schedule(problem.tables, found.orders, problem.limit, DispatchRule(gap=float("inf")))
    assert timed.orders == found.orders
    return timed.length - max(problem.head_starts)


@pytest.mark.parametrize(
    ("layout", "ranks", "microbatches", "costs", "limit", "best"),
    [
        (LINEAR, 1, 3, Costs(), 1, 9),
        (LINEAR, 2, 2, Costs(), 2, 7),
        (LINEAR, 2, 2, Costs(), 1, 10),  # one after the other; rank 0 begins while rank 1 does the last W
        (LINEAR, 2, 1, Costs(1, 2, 4, comm=3), 1, 2 + 4 + 4 + 6),
        (V, 2, 2, Costs(2, 2, 2), 4, 13),
        (LOOP, 2, 2, Costs(2, 2, 2), 4, 13),
    ],
)
def test_exact_search_finds_and_proves_the_optima_of_small_pipelines(
    layout: StageLayout, ranks: int, microbatches: int, costs: Costs, limit: int, best: int
) -> None:
    problem = problem_of(layout, ranks, microbatches, costs, limit)
    found = exact_search(problem, ROOMY, ENOUGH)
    assert found.proven
    assert length_of(problem, found) == shortest(problem) == best


def test_exact_search_returns_the_only_possible_order() -> None:
    problem = problem_of(LINEAR, 2, 1)
    orders = operations(problem, "F0 I0 W0", "F0 I0 W0")
    assert exact_search(problem, ROOMY, ENOUGH).orders == orders


@pytest.mark.parametrize(
    ("layout", "costs", "limit", "best"),
    [
        (V, Costs(2, 6, 2), 3, 36),
        (LOOP, Costs(2, 4, 2, comm=1), 4, 32),
        (LOOP, Costs(4, 6, 4, comm=2), 4, 58),
    ],
)
def test_exact_search_delays_a_forward_that_could_start_if_that_is_shorter(
    layout: StageLayout, costs: Costs, limit: int, best: int
) -> None:
    problem = problem_of(layout, 2, 3, costs, limit)
    found = exact_search(problem, ROOMY, ENOUGH)
    assert (found.proven, length_of(problem, found)) == (True, best)
    assert shortest(problem) == best


@given(problems(TINY, growing=False))
def test_exact_search_finds_the_shortest_schedule_and_proves_it(problem: Problem) -> None:
    found = exact_search(problem, ROOMY, ENOUGH)
    assert found.proven
    assert length_of(problem, found) == shortest(problem)


@given(problems(TINY))
def test_exact_search_claims_proof_only_for_the_optimum(problem: Problem) -> None:
    best = shortest(problem)
    found = exact_search(problem, ROOMY, ENOUGH)
    length = length_of(problem, found)
    assert best is not None
    assert length is None or length >= best
    assert not found.proven or length == best


@pytest.mark.parametrize(
    ("until_input", "until_weight", "limit"),
    [
        ([0, 1, 1, 3], [3, 0, 2, 2], 3),
        ([0, 2, 2, 0], [1, 1, 3, 1], 6),
    ],
)
def test_exact_search_is_right_where_input_gradients_take_memory(
    until_input: list[int], until_weight: list[int], limit: int
) -> None:
    """A weight gradient may have to come before another input gradient then."""
    costs = Costs(4, 4, 2, until_I=until_input, until_W=until_weight)
    problem = problem_of(V, 2, 2, costs, limit)
    found = exact_search(problem, ROOMY, ENOUGH)
    assert not found.proven or length_of(problem, found) == shortest(problem)


@given(problems(TINY, growing=False))
def test_exact_search_finds_nothing_shorter_than_the_known_optimum(problem: Problem) -> None:
    best = shortest(problem)
    assert best is not None
    known = best + max(problem.head_starts)
    assert exact_search(problem, known, ENOUGH)[:2] == (None, True)
    assert length_of(problem, exact_search(problem, known + 1, ENOUGH)) == best


def test_a_known_length_saves_nodes_of_exact_search() -> None:
    problem = problem_of(LINEAR, 3, 4, limit=2)
    first = exact_search(problem, ROOMY, ENOUGH)
    assert length_of(problem, first) == 17
    again = exact_search(problem, 17, ENOUGH)
    assert again.proven
    assert again.nodes < first.nodes


def test_exact_search_with_too_few_nodes_proves_nothing() -> None:
    problem = problem_of(LINEAR, 3, 4, limit=2)
    assert exact_search(problem, ROOMY, 5) == (None, False, 5)
    found = exact_search(problem, ROOMY, 60)  # enough for some schedule, not for all
    assert (found.proven, found.nodes) == (False, 60)
    assert found.orders is not None
    needed = exact_search(problem, ROOMY, ENOUGH).nodes
    assert exact_search(problem, ROOMY, needed) == (exact_search(problem, ROOMY, ENOUGH).orders, True, needed)
    assert not exact_search(problem, ROOMY, needed - 1).proven


def test_exact_search_places_weight_gradients_where_they_delay_no_rank() -> None:
    problem = problem_of(LINEAR, 2, 2, limit=2)
    found = exact_search(problem, ROOMY, ENOUGH)
    assert found.orders is not None
    assert words(problem, found.orders)[0] == "F0 F1 I0 W0 I1 W1"
    assert schedule_of(problem, found.orders).order[1][0] == "1F0"
