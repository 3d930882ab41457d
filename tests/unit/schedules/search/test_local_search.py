"""Local search for short schedules, and policies of building blocks fitted to costs."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import LINEAR, LOOP, V, problem_of, problems, require_legal

from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, BlockPolicy, policy_schedule
from plait.schedules.schedule import Placement
from plait.schedules.search import list_scheduling
from plait.schedules.search import local_search as module_of_search
from plait.schedules.search import local_search as patterns
from plait.schedules.search.initial_orders import InitialOrder, initial_orders, orders_from
from plait.schedules.search.list_scheduling import DispatchRule, TimedOrders, list_schedule
from plait.schedules.search.local_search import (
    DISPATCH_RULES,
    LEAST,
    Candidate,
    fit_block_policy,
    local_search,
    shortened_problem,
)
from plait.schedules.search.lower_bound import lower_bound
from plait.schedules.search.problem import OperationTables, Problem, StageLayout

LAYOUTS: tuple[StageLayout, ...] = (LINEAR, V, LOOP)
COSTS = Costs(1.1, 1.3, 0.8, comm=0.1)
BUDGET = 100_000


def entrants(of_span: bool = False) -> list[Problem]:
    return [problem_of(layout, 2, 4, COSTS, 2 * layout[1], of_span) for layout in LAYOUTS]


def test_local_search_is_deterministic() -> None:
    assert local_search(entrants(), BUDGET) == local_search(entrants(), BUDGET)
    # Of these no policy has the stages, so that shapes are drawn sooner.
    drawn = problem_of((Placement.V, 3), 2, 4, COSTS, 6)
    assert local_search([drawn], BUDGET) == local_search([drawn], BUDGET)


def test_local_search_returns_legal_candidates_shortest_first() -> None:
    for of_span in [False, True]:
        candidates = local_search(entrants(of_span), BUDGET)
        lengths = [candidate.length for candidate in candidates]
        assert lengths == sorted(lengths)
        for candidate in candidates:
            assert candidate.problem in entrants(of_span)
            require_legal(candidate.problem, candidate.timed.orders)


def test_lengths_of_different_layouts_are_in_one_unit() -> None:
    fine, coarse = (problem_of(layout, 2, 2, Costs(2, 2, 2)) for layout in (V, LINEAR))
    lengths = [
        Candidate(problem, InitialOrder("any"), DispatchRule(), TimedOrders(ticks, [], [])).length
        for problem, ticks in ((fine, 26), (coarse, 13))
    ]
    assert lengths == [26, 26]


def test_local_search_reaches_the_lower_bound_of_zb_h1() -> None:
    # Within the memory of 1f1b, one chunk a rank: the makespan of zb-h1, which the bound shows to be best.
    problem = problem_of(LINEAR, 4, 8, limit=4)
    assert local_search([problem], 1)[0].timed.length == lower_bound(problem) == 27


def test_local_search_shortens_long_pipelines_to_few_micro_batches() -> None:
    for layout, ranks, microbatches, limit, short in [
        (LINEAR, 4, 100, 4, 8),
        (LINEAR, 4, 100, 7, 11),  # more of them are under way at once
        (LINEAR, 4, 100, 1, 8),
        (LINEAR, 4, 5, 4, 5),
        (V, 4, 100, 8, 8),
        ((Placement.LOOP, 4), 4, 100, 28, 11),
    ]:
        problem = problem_of(layout, ranks, microbatches, limit=limit)
        assert shortened_problem(problem) == replace(problem, microbatches=short)


def test_local_search_shortens_pipelines_that_hold_no_memory() -> None:
    problem = problem_of(LINEAR, 4, 100, Costs(until_I=0, until_W=0), limit=0)
    assert shortened_problem(problem) == replace(problem, microbatches=8)


def test_the_result_of_local_search_has_all_micro_batches() -> None:
    problem = problem_of(LINEAR, 2, 40, limit=2)
    (best, *_) = local_search([problem], 1)
    assert best.problem == problem
    assert best.timed.length == lower_bound(problem) == 121


@pytest.mark.parametrize(("budget", "perturbed"), [(5_000, 1), (20_000, 1), (60_000, 3)])
def test_the_operations_that_are_scheduled_are_those_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int, perturbed: int
) -> None:
    """A third by screening and refinement each, and the rest by perturbation, to the last round begun."""
    problem, scheduled = problem_of(LINEAR, 3, 6, COSTS, 3), Counter[str]()

    def counted(tables: OperationTables, *arguments: Any) -> TimedOrders:
        scheduled[sys._getframe(1).f_code.co_name] += len(tables.duration)
        return list_schedule(tables, *arguments)

    for module in (list_scheduling, module_of_search):
        monkeypatch.setattr(module, "list_schedule", counted)
    found = local_search([problem], budget)
    assert len(found) == perturbed
    assert found[0].timed.length > lower_bound(problem)  # which would have ended the search
    assert problem.size == 54
    rest = scheduled["_perturb_once"]
    assert 0.35 * budget <= rest <= 0.35 * budget + 2 * 54 * perturbed
    assert 0.8 * budget <= scheduled.total() <= budget


@given(problems())
def test_local_search_without_budget_returns_a_legal_candidate(problem: Problem) -> None:
    candidates = local_search([problem], 0)
    assert 1 <= len(candidates) <= LEAST
    require_legal(problem, candidates[0].timed.orders)


BLOCK_COSTS = (Costs(), Costs(comm=0.5), Costs(1, 1.3, 0.7, comm=0.1), Costs(W=0))


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


@pytest.mark.parametrize("costs", BLOCK_COSTS)
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
