from __future__ import annotations

import pytest
from hypothesis import given, settings
from search_cases import LINEAR, LOOP, V, problem_of, problems, require_legal

from plait.schedules.schedule import Placement
from plait.schedules.search.bound import lower_bound
from plait.schedules.search.initial_orders import InitialOrder
from plait.schedules.search.list_scheduling import Habit, Settled
from plait.schedules.search.local_search import LEAST, Runner, race, short_run
from plait.schedules.search.problem import Layout, Problem
from plait.schedules.simulation.costs import Costs

LAYOUTS: tuple[Layout, ...] = (LINEAR, V, LOOP)
COSTS = Costs(1.1, 1.3, 0.8, comm=0.1)
EFFORT = 100_000


def entrants(of_span: bool = False) -> list[Problem]:
    return [problem_of(layout, 2, 4, COSTS, 2 * layout[1], of_span) for layout in LAYOUTS]


def test_the_same_race_ends_the_same() -> None:
    assert race(entrants(), EFFORT) == race(entrants(), EFFORT)
    # Of these no policy has the stages, so that shapes are drawn sooner.
    drawn = problem_of((Placement.V, 3), 2, 4, COSTS, 6)
    assert race([drawn], EFFORT) == race([drawn], EFFORT)


@pytest.mark.parametrize("of_span", [False, True])
def test_the_shortest_come_in_first(of_span: bool) -> None:
    runners = race(entrants(of_span), EFFORT)
    lengths = [runner.length for runner in runners]
    assert lengths == sorted(lengths)
    for runner in runners:
        assert runner.problem in entrants(of_span)
        require_legal(runner.problem, runner.settled.orders)


def test_lengths_of_layouts_are_in_one_unit() -> None:
    fine, coarse = (problem_of(layout, 2, 2, Costs(2, 2, 2)) for layout in (V, LINEAR))
    lengths = [
        Runner(problem, InitialOrder("any"), Habit(), Settled(ticks, [], [])).length
        for problem, ticks in ((fine, 26), (coarse, 13))
    ]
    assert lengths == [26, 26]


def test_it_finds_the_best_of_what_is_known_to_be_best() -> None:
    # Within the memory of 1f1b, one chunk a rank: the makespan of zb-h1, which the bound shows to be best.
    problem = problem_of(LINEAR, 4, 8, limit=4)
    assert race([problem], 1)[0].settled.length == lower_bound(problem) == 27


@pytest.mark.parametrize(
    ("layout", "ranks", "microbatches", "limit", "short"),
    [
        (LINEAR, 4, 100, 4, 8),
        (LINEAR, 4, 100, 7, 11),  # more of them are under way at once
        (LINEAR, 4, 100, 1, 8),
        (LINEAR, 4, 5, 4, 5),
        (V, 4, 100, 8, 8),
        ((Placement.LOOP, 4), 4, 100, 28, 11),
    ],
)
def test_a_short_run(layout: Layout, ranks: int, microbatches: int, limit: int, short: int) -> None:
    problem = problem_of(layout, ranks, microbatches, limit=limit)
    assert short_run(problem) == problem.shortened(short)


def test_a_short_run_where_nothing_is_held() -> None:
    problem = problem_of(LINEAR, 4, 100, Costs(until_I=0, until_W=0), limit=0)
    assert short_run(problem) == problem.shortened(8)


def test_a_long_pipeline_is_run_at_full_length() -> None:
    problem = problem_of(LINEAR, 2, 40, limit=2)
    (best, *_) = race([problem], 1)
    assert best.problem == problem
    assert best.settled.length == lower_bound(problem) == 121


@settings(max_examples=30)
@given(problems())
def test_there_is_always_a_winner(problem: Problem) -> None:
    runners = race([problem], 0)
    assert 1 <= len(runners) <= LEAST
    require_legal(problem, runners[0].settled.orders)
