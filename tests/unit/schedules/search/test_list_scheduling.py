from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import LINEAR, LOOP, V, operations, problem_of, problems, require_legal, words

from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.search.initial_orders import InitialOrder, initial_orders, orders_from
from plait.schedules.search.list_scheduling import Budget, DispatchRule, TimedOrders, justify, list_schedule
from plait.schedules.search.problem import Orders, Problem

ROWS = ("F0 F1 I0 I1 W0 W1", "F0 I0 F1 I1 W0 W1")
ALONE = ((LINEAR, 1, 4), (V, 1, 3), (LOOP, 1, 3), ((LOOP[0], 4), 1, 2))
DISPATCH_RULES = (DispatchRule(), DispatchRule(0.0), DispatchRule(1.0, True), DispatchRule(3.0))


def timed(rows: tuple[str, ...], costs: Costs | None = None, limit: int = 9, gap: float = 0.5) -> list[str]:
    problem = problem_of(LINEAR, 2, 2, costs, limit)
    return words(
        problem, list_schedule(problem.tables, operations(problem, *rows), limit, DispatchRule(gap)).orders
    )


@st.composite
def started(draw: st.DrawFn) -> tuple[Problem, Orders]:
    """A problem, and orders to schedule."""
    problem = draw(problems())
    number = draw(st.integers(0, 40))
    return problem, orders_from(problem, next(islice(initial_orders(problem, Random(0)), number, None)))


def test_a_weight_gradient_fills_a_gap() -> None:
    # F0 F1  . I0  . I1 W0 W1    rank 0 waits for I1 of rank 1
    #  . F0 I0 F1 I1 W0 W1
    assert timed(ROWS) == ["F0 F1 I0 W0 I1 W1", ROWS[1]]


def test_list_scheduling_keeps_an_order_without_usable_gaps() -> None:
    rows = ("F0 F1 I0 I1 W0 W1", "F0 F1 I0 I1 W0 W1")
    assert timed(rows) == timed(rows, Costs(1, 1, 1, comm=1)) == list(rows)


def test_list_scheduling_fills_a_gap_of_at_least_a_fraction_of_the_operation() -> None:
    costs = Costs(1, 1, 2)  # the gap of rank 0 is 1
    assert timed(ROWS, costs, gap=0.5) == ["F0 F1 I0 W0 I1 W1", ROWS[1]]
    assert timed(ROWS, costs, gap=0.6) == list(ROWS)
    assert timed(ROWS, Costs(1, 1, 200), gap=0.0) == ["F0 F1 I0 W0 I1 W1", ROWS[1]]


def test_a_forward_fills_a_gap_where_there_is_room_for_it() -> None:
    rows = ("F0 I0 W0 F1 I1 W1", "F0 I0 W0 F1 I1 W1")
    assert timed(rows, limit=2) == ["F0 F1 I0 W0 I1 W1", rows[1]]
    assert timed(rows, limit=1) == list(rows)


def test_a_forward_stays_out_where_what_comes_before_it_needs_the_room() -> None:
    # Rank 0 could do F2 while it waits for I0, but F1 stands before and nothing is given back until then.
    problem = problem_of(LINEAR, 2, 3, Costs(1, 1, 1, comm=5), limit=2)
    rows = ("F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 W0 F1 I1 W1 F2 I2 W2")
    found = list_schedule(problem.tables, operations(problem, *rows), 2, DispatchRule())
    assert words(problem, found.orders)[0] == rows[0]


def test_the_rule_consumed_first_runs_awaited_operations_first() -> None:
    problem = problem_of(LINEAR, 2, 3, Costs(until_W=0), limit=2)
    orders = operations(problem, "F0 F1 I0 I1 W0 F2 W1 I2 W2", "F0 I0 F1 I1 W0 W1 F2 I2 W2")

    def first_rank(rule: DispatchRule) -> str:
        return words(problem, list_schedule(problem.tables, orders, 2, rule).orders)[0]

    assert first_rank(DispatchRule()) == "F0 F1 I0 W0 I1 F2 W1 I2 W2"
    assert first_rank(DispatchRule(consumed_first=True)) == "F0 F1 I0 F2 I1 W0 W1 I2 W2"


def test_the_length_of_a_list_schedule_is_its_last_end() -> None:
    problem = problem_of(LINEAR, 2, 2)
    found = list_schedule(problem.tables, operations(problem, *ROWS), 9, DispatchRule())
    assert found.length == max(found.ends) == 7
    assert found.ends == [1, 2, 4, 6, 5, 7, 2, 4, 3, 5, 6, 7]
    assert found.reversed() == [order[::-1] for order in found.orders]


def test_the_span_of_a_list_schedule_counts_from_each_ranks_own_start() -> None:
    problem = problem_of(LINEAR, 2, 2, of_span=True)
    found = list_schedule(problem.tables, operations(problem, *ROWS), 9, DispatchRule())
    assert found.ends[5] == found.ends[11] == 7
    assert found.length == 8  # rank 0 ends at 7 like rank 1, which may end 1 later
    assert problem.measure(found.length) == 7


def test_list_scheduling_refuses_orders_that_deadlock() -> None:
    problem = problem_of()
    stuck = operations(problem, "F0 I0 W0 F1 I1 W1", "F1 I1 W1 F0 I0 W0")
    with pytest.raises(AssertionError, match="orders that cannot be run"):
        list_schedule(problem.tables, stuck, 1, DispatchRule())


def test_times_may_be_as_fine_as_floats_are() -> None:
    costs = Costs(0.01852212345678901, 0.01808698765432109, 0.009337, comm=6.012345678901234e-07)
    problem = problem_of(LINEAR, 2, 64, costs, limit=2)
    found = list_schedule(
        problem.tables, problem.orders_of(policy_schedule("1f1b", 2, 64).actions), 2, DispatchRule()
    )
    require_legal(problem, found.orders)


@given(problems(ALONE), st.sampled_from(DISPATCH_RULES))
def test_list_scheduling_keeps_the_order_of_one_rank(problem: Problem, rule: DispatchRule) -> None:
    orders = orders_from(problem, next(initial_orders(problem, Random(0))))
    assert list_schedule(problem.tables, orders, problem.limit, rule).orders == orders


@given(started(), st.sampled_from(DISPATCH_RULES))
def test_list_scheduling_gives_legal_orders_within_the_limit(
    case: tuple[Problem, Orders], rule: DispatchRule
) -> None:
    problem, orders = case
    found = list_schedule(problem.tables, orders, problem.limit, rule)
    require_legal(problem, found.orders)
    require_ends(problem, found)


@given(started(), st.sampled_from(DISPATCH_RULES))
def test_list_scheduling_of_the_mirrored_problem_gives_legal_orders(
    case: tuple[Problem, Orders], rule: DispatchRule
) -> None:
    problem, orders = case
    backwards = [order[::-1] for order in orders]
    late = list_schedule(problem.mirrored_tables, backwards, problem.limit, rule)
    require_legal(problem, late.reversed())
    again = list_schedule(problem.tables, late.reversed(), problem.limit, rule)
    require_legal(problem, again.orders)


def require_ends(problem: Problem, found: TimedOrders) -> None:
    """Everything ends after what it needs, and nothing overlaps on a rank."""
    tables = problem.tables
    for order in found.orders:
        free = 0
        for operation in order:
            start = found.ends[operation] - tables.duration[operation]
            assert start >= free
            free = found.ends[operation]
            if tables.needs[operation] >= 0:
                assert start >= found.ends[tables.needs[operation]] + tables.delay[operation]


@given(started(), st.integers(0, 9), st.sampled_from((0.0, 0.1, 0.5, 1.0)))
def test_list_scheduling_with_random_swaps_gives_legal_orders(
    case: tuple[Problem, Orders], seed: int, swap_chance: float
) -> None:
    problem, orders = case
    rule = DispatchRule(swap_chance=swap_chance)
    found = list_schedule(problem.tables, orders, problem.limit, rule, Random(seed))
    require_legal(problem, found.orders)
    assert list_schedule(problem.tables, orders, problem.limit, rule, Random(seed)) == found
    late = list_schedule(problem.mirrored_tables, found.reversed(), problem.limit, rule, Random(seed))
    require_legal(problem, late.reversed())


def test_random_swaps_change_the_orders_by_seed() -> None:
    problem = problem_of(LINEAR, 4, 8, limit=4)
    orders = problem.orders_of(policy_schedule("zb-h1", 4, 8).actions)
    calm = list_schedule(problem.tables, orders, 4, DispatchRule(), Random(0))
    assert calm == list_schedule(problem.tables, orders, 4, DispatchRule())
    restless = [
        list_schedule(problem.tables, orders, 4, DispatchRule(swap_chance=0.5), Random(seed))
        for seed in (0, 1)
    ]
    assert restless[0].orders != restless[1].orders != calm.orders


@given(started(), st.sampled_from(DISPATCH_RULES), st.integers(0, 4))
def test_justification_never_lengthens_a_schedule(
    case: tuple[Problem, Orders], rule: DispatchRule, rounds: int
) -> None:
    problem, orders = case
    start = list_schedule(problem.tables, orders, problem.limit, rule)
    best = justify(problem, start, rule, rounds)
    require_legal(problem, best.orders)
    assert best.length <= start.length
    assert rounds or best is start


def test_justification_shortens_gpipe() -> None:
    problem = problem_of(LINEAR, 4, 8, limit=8)
    start = list_schedule(
        problem.tables, problem.orders_of(policy_schedule("gpipe", 4, 8).actions), 8, DispatchRule()
    )
    assert (start.length, justify(problem, start, DispatchRule(), 6).length) == (30, 27)


def test_justification_keeps_the_best_of_all_rounds() -> None:
    problem = problem_of(LINEAR, 4, 4, Costs(1, 2, 3, comm=1), limit=3)
    start = list_schedule(problem.tables, orders_from(problem, InitialOrder("zb-h1")), 3, DispatchRule())
    late = list_schedule(problem.mirrored_tables, start.reversed(), 3, DispatchRule())
    again = list_schedule(problem.tables, late.reversed(), 3, DispatchRule())
    assert (start.length, again.length) == (42, 43)
    assert justify(problem, start, DispatchRule(), 1) is start


def test_justification_ends_when_no_effort_is_left() -> None:
    problem = problem_of(LINEAR, 4, 8, limit=8)
    start = list_schedule(
        problem.tables, problem.orders_of(policy_schedule("gpipe", 4, 8).actions), 8, DispatchRule()
    )
    budget = Budget(1)
    justify(problem, start, DispatchRule(), 6, budget)
    assert budget.left == 1 - 2 * problem.size  # one round, from the back and from the front
    assert justify(problem, start, DispatchRule(), 6, budget) is start
