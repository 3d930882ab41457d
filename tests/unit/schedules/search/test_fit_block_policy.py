"""What is left out for speed does not change a block policy: against all rules, each to the end."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import LINEAR, problem_of

from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, BlockPolicy, policy_schedule
from plait.schedules.search import local_search as patterns
from plait.schedules.search.initial_orders import initial_orders, orders_from
from plait.schedules.search.list_scheduling import DispatchRule, TimedOrders, list_schedule
from plait.schedules.search.local_search import DISPATCH_RULES, fit_block_policy
from plait.schedules.search.problem import Problem

COSTS = (Costs(), Costs(comm=0.5), Costs(1, 1.3, 0.7, comm=0.1), Costs(W=0))


@given(
    ranks=st.integers(2, 4),
    microbatches=st.integers(2, 6),
    times=st.tuples(*(st.integers(1, 3) for _ in range(3)), st.integers(0, 2)),
    number=st.integers(0, 40),
)
def test_dispatch_rules_left_out_give_the_outcome_of_one_that_is_tried(
    ranks: int, microbatches: int, times: tuple[int, int, int, int], number: int
) -> None:
    problem = problem_of(LINEAR, ranks, microbatches, Costs(*times), limit=ranks)
    orders = orders_from(problem, next(islice(initial_orders(problem, Random(0)), number, None)))
    tried = {outcome(problem, orders, rule) for rule in patterns._different(DISPATCH_RULES, problem)}
    assert {outcome(problem, orders, rule) for rule in DISPATCH_RULES} == tried


def outcome(problem: Problem, orders: list[list[int]], rule: DispatchRule) -> str:
    """An order timed from the front and then from the back, as text."""
    ahead = list_schedule(problem.tables, orders, problem.limit, rule)
    return repr((ahead, list_schedule(problem.mirrored_tables, ahead.reversed(), problem.limit, rule)))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_fitting_a_pattern_gives_the_result_of_trying_every_dispatch_rule(
    name: str, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, policy = policy_schedule(name, 4, 12), POLICIES[name]
    assert isinstance(policy, BlockPolicy)
    made = fit_block_policy(pattern, policy, costs)
    monkeypatch.setattr(patterns, "_different", lambda rules, problem: rules)
    monkeypatch.setattr(patterns, "lower_bound", lambda problem: -1)
    assert fit_block_policy(pattern, policy, costs) == made


def test_fit_block_policy_does_not_time_orders_that_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[TimedOrders] = []

    def counted(*arguments: object) -> TimedOrders:
        timed.append(list_schedule(*arguments))  # type: ignore[arg-type]
        return timed[-1]

    monkeypatch.setattr(patterns, "list_schedule", counted)
    policy = POLICIES["zb-v"]
    assert isinstance(policy, BlockPolicy)
    fit_block_policy(policy_schedule("zb-v", 4, 12), policy, Costs())
    assert len(timed) == 1, "the first rule reaches the bound"
    assert len(list(patterns._different(DISPATCH_RULES, problem_of(LINEAR, 4, 12)))) == 2, (
        "unit costs: every gap is filled"
    )
    assert len(list(patterns._different(DISPATCH_RULES, problem_of(LINEAR, 4, 12, Costs(W=5))))) == len(
        DISPATCH_RULES
    )
