from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import LINEAR, LOOP, V, operations, problem_of, problems, require_legal, words

from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Placement
from plait.schedules.search.initial_orders import (
    BlockParameters,
    InitialOrder,
    admit_in_order,
    block_for,
    initial_orders,
    orders_from,
)
from plait.schedules.search.problem import Problem, StageLayout

PLAIN = (0, 0, 0)


def first_starts(problem: Problem, count: int) -> Iterator[InitialOrder]:
    return islice(initial_orders(problem, Random(0)), count)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (LINEAR, ["zb-h2", "zb-h1", "1f1b", "gpipe"]),
        (V, ["v-min", "v-half", "zb-v"]),
        ((Placement.V, 3), []),
        (LOOP, ["interleaved"]),
        ((Placement.LOOP, 3), ["interleaved"]),
    ],
)
def test_initial_orders_begin_with_policies_that_have_the_stages(
    layout: StageLayout, names: list[str]
) -> None:
    found = list(first_starts(problem_of(layout), 60))
    named = [start.origin for start in found if isinstance(start.origin, str)]
    assert named == names * 4  # four tempers
    assert found[: len(names)] == [InitialOrder(name) for name in names]
    assert all(isinstance(start.origin, str) for start in found[: len(named)])
    assert found[len(named)] == InitialOrder(BlockParameters(1, 0.0, (0, 0), (0,) * (2 * layout[1] - 1)))


def test_initial_orders_are_random_only_with_a_given_generator() -> None:
    problem = problem_of(V)
    assert list(first_starts(problem, 200)) == list(first_starts(problem, 200))
    assert list(islice(initial_orders(problem, Random(1)), 200)) != list(first_starts(problem, 200))


def test_an_initial_order_of_a_policy_within_the_limit_is_unchanged() -> None:
    problem = problem_of(LINEAR, 4, 8, limit=4)
    assert orders_from(problem, InitialOrder("1f1b")) == problem.orders_of(
        policy_schedule("1f1b", 4, 8).actions
    )
    problem = problem_of(LOOP, 2, 4)
    assert orders_from(problem, InitialOrder("interleaved")) == problem.orders_of(
        policy_schedule("interleaved", 2, 4).actions
    )


def test_an_initial_order_of_a_policy_above_the_limit_is_changed_to_keep_it() -> None:
    problem = problem_of(LINEAR, 2, 3, limit=2)
    assert words(problem, orders_from(problem, InitialOrder("gpipe"))) == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
    ]
    problem = problem_of(LINEAR, 2, 3, limit=1)
    alone = "F0 I0 W0 F1 I1 W1 F2 I2 W2"
    assert words(problem, orders_from(problem, InitialOrder("gpipe"))) == [alone, alone]


def test_where_there_is_room_forwards_come_earlier_and_weight_gradients_later() -> None:
    problem = problem_of(LINEAR, 2, 4, limit=4)
    assert words(problem, orders_from(problem, InitialOrder("1f1b"))) == [
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3",
    ]
    eager = words(problem, orders_from(problem, InitialOrder("1f1b", eager=1)))
    assert eager[0].split().index("F2") < eager[0].split().index("I0")
    lazy = words(problem, orders_from(problem, InitialOrder("1f1b", lazy=1.0)))
    assert lazy[0].split().index("I2") < lazy[0].split().index("W0")
    assert lazy[1].split().index("I3") < lazy[1].split().index("W0")


def test_a_pattern_has_the_period_of_the_most_loaded_rank() -> None:
    problem = problem_of(V, 2, 4)
    assert block_for(problem, BlockParameters(1, 0.0, (0, 0), PLAIN)).period == 6
    stretched = block_for(problem, BlockParameters(1, 0.25, (0, 0), PLAIN))
    assert stretched.period == 8  # 6 and a quarter, in whole cells


def test_a_pattern_with_more_cells_has_lengths_in_proportion_to_costs() -> None:
    problem = problem_of(LINEAR, 2, 4, Costs(1, 2, 3))
    assert block_for(problem, BlockParameters(1, 0.0, (0, 0), (0,))).lengths == ((1, 1), (1, 1), (1, 1))
    assert block_for(problem, BlockParameters(2, 0.0, (0, 0), (0,))).lengths == ((1, 1), (2, 2), (3, 3))


def test_an_operation_without_cost_takes_one_cell_of_a_pattern() -> None:
    for costs in (Costs(0, 0, 0), Costs(0, 1, 1000)):
        pattern = block_for(problem_of(V, 2, 4, costs), BlockParameters(2, 0.0, (1, 1), (1, 1, 1)))
        assert min(map(min, pattern.lengths)) == 1


def test_operations_are_admitted_in_the_order_of_their_keys_within_the_limit() -> None:
    problem = problem_of(LINEAR, 2, 2, limit=2)
    kinds = [lane % 3 for lane in problem.tables.lane]
    assert admit_in_order(problem, kinds) == operations(problem, "F0 F1 I0 I1 W0 W1", "F0 F1 I0 I1 W0 W1")
    backwards = [2 - kind for kind in kinds]
    alone = "F0 I0 W0 F1 I1 W1"
    assert admit_in_order(problem, backwards) == operations(problem, "F0 F1 I0 W0 I1 W1", alone)
    assert admit_in_order(problem_of(LINEAR, 2, 2, limit=1), kinds) == operations(problem, alone, alone)


def test_ranks_with_room_for_different_numbers_of_forwards_do_not_wait_for_each_other() -> None:
    # Only rank 0 holds anything, so only rank 1 can bring forwards forward: chunk 0 before chunk 1, of which
    # rank 0 needs a result before it can go on with chunk 0.
    problem = problem_of(V, 2, 4, Costs(until_I=[0, 0, 0, 1], until_W=0), limit=1)
    for start in first_starts(problem, 60):
        require_legal(problem, orders_from(problem, start))


@given(problems(), st.integers(0, 70))
def test_every_initial_order_can_run_within_the_memory_limit(problem: Problem, number: int) -> None:
    start = next(islice(initial_orders(problem, Random(0)), number, None))
    orders = orders_from(problem, start)
    require_legal(problem, orders)
    assert sorted(operation for order in orders for operation in order) == list(range(problem.size))


@given(problems(), st.randoms(use_true_random=False))
def test_any_keys_give_orders_that_can_run_within_the_memory_limit(problem: Problem, rng: Random) -> None:
    require_legal(problem, admit_in_order(problem, [rng.randrange(100) for _ in range(problem.size)]))
