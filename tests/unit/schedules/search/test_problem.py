from __future__ import annotations

from fractions import Fraction
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from search_cases import LINEAR, LOOP, V, operations, problem_of, problems

from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.search.problem import Problem

ONE = problem_of(V, 2, 1, Costs(2, 4, 6, comm=5, until_I=4, until_W=2))
"""Two ranks, two chunks each in a v, one micro-batch: operation `3 * stage + kind`. Ticks are of 1."""
NONE = -1


def test_the_tables_of_a_v_list_dependencies_and_memory_of_each_operation() -> None:
    assert ONE.rank_of == (0, 1, 1, 0)
    assert ONE.stages_of == ((0, 3), (1, 2))
    tables = ONE.tables
    assert tables.rank == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert tables.needs == [NONE, 4, NONE, 0, 7, NONE, 3, 10, NONE, 6, 9, NONE]
    assert tables.feeds == [3, NONE, NONE, 6, 1, NONE, 9, 4, NONE, 10, 7, NONE]
    assert tables.delay == [0, 5, 0, 5, 0, 0, 0, 5, 0, 5, 0, 0]  # next door is the same rank in the middle
    assert tables.after == [NONE, 0, 1, NONE, 3, 4, NONE, 6, 7, NONE, 9, 10]
    assert tables.lanes == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert tables.duration == [1, 2, 3] * 4
    assert tables.memory_change == [2, -1, -1] * 4
    assert tables.is_last == [False, False, True] * 4


def test_the_mirrored_tables_of_a_v_swap_needs_and_feeds() -> None:
    tables = ONE.mirrored_tables
    assert tables.needs == ONE.tables.feeds
    assert tables.feeds == ONE.tables.needs
    assert tables.delay == [5, 0, 0, 0, 5, 0, 5, 0, 0, 0, 5, 0]
    assert tables.after == [1, 2, NONE, 4, 5, NONE, 7, 8, NONE, 10, 11, NONE]
    assert tables.memory_change == [-2, 1, 1] * 4
    assert tables.is_last == [True, False, False] * 4
    assert (tables.duration, tables.rank, tables.lanes) == (
        ONE.tables.duration,
        ONE.tables.rank,
        ONE.tables.lanes,
    )


def test_operations_of_one_stage_and_kind_are_numbered_consecutively() -> None:
    tables = problem_of(LINEAR, 2, 3).tables
    assert tables.lane == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert tables.needs == [NONE] * 3 + [12, 13, 14] + [NONE] * 3 + [0, 1, 2] + [9, 10, 11] + [NONE] * 3
    assert list(tables.microbatches) == [0, 1, 2]
    assert list(problem_of(LINEAR, 2, 3).mirrored_tables.microbatches) == [2, 1, 0]


def test_for_a_makespan_all_ranks_have_end_offset_0() -> None:
    problem = problem_of(LINEAR, 3, 2, Costs(2, 1, 1, comm=0.5))
    assert problem.first_starts == (0, 5, 10)
    assert problem.head_starts == (0, 0, 0)
    assert problem.tables.end_offsets == problem.mirrored_tables.start_offsets == [0, 0, 0]


def test_for_a_span_a_rank_that_starts_later_may_end_later() -> None:
    problem = problem_of(V, 3, 2, Costs(2, 2, 2, comm=0.5), of_span=True)
    assert problem.ticks.tick == Fraction(1, 2)
    assert problem.first_starts == (0, 3, 6, 8, 11, 14)  # no hop between the stages in the middle
    assert problem.head_starts == (0, 3, 6)
    assert problem.tables.start_offsets == problem.mirrored_tables.end_offsets == [0, 0, 0]
    assert problem.tables.end_offsets == problem.mirrored_tables.start_offsets == [6, 3, 0]
    assert problem.measure(46) == 20


def test_with_one_stage_a_rank_all_placements_give_the_same_problem() -> None:
    v, loop, line = (problem_of((layout[0], 1), 3) for layout in (V, LOOP, LINEAR))
    assert v.tables == loop.tables == line.tables


def test_a_full_backward_becomes_input_and_weight_gradient_operations() -> None:
    problem = problem_of(LINEAR, 1, 2)
    (order,) = problem.orders_of([[Action(0, Kind.F, 0), Action(0, Kind.B, 0)]])
    assert order == [0, 2, 4]
    assert problem.actions_of([order]) == (tuple(Action(0, kind, 0) for kind in (Kind.F, Kind.I, Kind.W)),)


def test_actions_of_a_schedule_are_converted_to_operations_and_back() -> None:
    problem = problem_of(LINEAR, 2, 4)
    made = policy_schedule("zb-h1", 2, 4)
    orders = problem.orders_of(made.actions)
    assert orders == operations(
        problem, "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
    )
    assert tuple(map(tuple, problem.actions_of(orders))) == made.actions


@given(problems(), st.randoms(use_true_random=False))
def test_operations_survive_conversion_to_actions_and_back(problem: Problem, rng: Random) -> None:
    orders = [
        [operation for operation in range(problem.size) if problem.tables.rank[operation] == rank]
        for rank in range(problem.ranks)
    ]
    for order in orders:
        rng.shuffle(order)
    assert problem.orders_of(problem.actions_of(orders)) == orders


@given(problems())
def test_mirroring_a_problem_swaps_predecessors_and_successors(problem: Problem) -> None:
    ahead, mirrored_tables = problem.tables, problem.mirrored_tables
    for operation, follower in enumerate(ahead.feeds):
        assert mirrored_tables.needs[operation] == follower
        if follower >= 0:
            assert mirrored_tables.feeds[follower] == ahead.needs[follower] == operation
            assert mirrored_tables.delay[operation] == ahead.delay[follower]
        if ahead.after[operation] >= 0:
            assert mirrored_tables.after[ahead.after[operation]] == operation
    assert (
        list(map(sum, zip(ahead.memory_change, mirrored_tables.memory_change, strict=True)))
        == [0] * problem.size
    )


@given(problems(), st.integers(0, 1000))
def test_a_length_in_ticks_survives_conversion_to_time_and_back(problem: Problem, length: int) -> None:
    assert problem.length(problem.measure(length)) == length
    assert problem.length(problem.measure(length) - problem.ticks.tick / 3) == length
    assert problem.length(problem.measure(length) + problem.ticks.tick / 3) == length + 1
