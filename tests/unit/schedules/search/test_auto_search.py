from __future__ import annotations

from itertools import pairwise
from math import inf, isinf
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import ROOMY, any_costs, operations, problem_of, searched, shortest, times

from parity.pairs import Row, covering_rows, every_row, in_quick
from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Kind
from plait.schedules.check import check
from plait.schedules.costs import Costs, limit_in_units
from plait.schedules.named_schedules import POLICIES
from plait.schedules.schedule import Placement
from plait.schedules.search import auto_search
from plait.schedules.search.initial_orders import InitialOrder
from plait.schedules.search.list_scheduling import DispatchRule, list_schedule
from plait.schedules.search.local_search import Candidate
from plait.schedules.search.memory_guard import least_memory
from plait.schedules.search.problem import Problem, StageLayout
from plait.schedules.search.schedule_by_policy import schedule

MEASURES: tuple[auto_search.Measure, ...] = ("makespan", "span")


class Case(NamedTuple):
    """What to search for."""

    ranks: int
    microbatches: int
    chunks: int | None
    costs: Costs
    measure: auto_search.Measure
    limit: float

    def search(self, budget: int = 2000, nodes: int = 300) -> Timeline:
        ranks, microbatches, chunks, costs, measure, limit = self
        return searched(ranks, microbatches, costs, limit, chunks, measure, budget, nodes)

    def play(self, policy: str) -> Timeline:
        """A named policy in time, whatever it holds."""
        made = schedule(policy, ranks=self.ranks, microbatches=self.microbatches, costs=self.costs)
        return simulate(made, self.costs)

    def value(self, timeline: Timeline) -> float:
        return timeline.makespan if self.measure == "makespan" else timeline.span


@st.composite
def cases(draw: st.DrawFn, ranks: int, microbatches: int) -> Case:
    """Where chunks are given, costs may differ from stage to stage. Limits are from the least on."""
    ranks, microbatches = draw(st.integers(1, ranks)), draw(st.integers(1, microbatches))
    chunks = draw(st.sampled_from((None, 1, 2, 3)))
    costs = draw(any_costs(0 if chunks is None else ranks * chunks))
    least = least_limit(ranks, chunks, costs)
    limit = draw(st.sampled_from((least, inf)) | times().map(lambda more: least + more))
    return Case(ranks, microbatches, chunks, costs, draw(st.sampled_from(MEASURES)), limit)


def layouts(chunks: int | None) -> list[StageLayout]:
    counts = range(1, 5) if chunks is None else [chunks]
    return [(placement, count) for placement in (Placement.V, Placement.LOOP) for count in counts]


def least_limit(ranks: int, chunks: int | None, costs: Costs) -> float:
    """The least with which the pipeline can be run, in whichever layout."""
    problems = [problem_of(layout, ranks, 1, costs) for layout in layouts(chunks)]
    return float(
        min(
            problem.memory_costs.unit * max(least_memory(problem, rank) for rank in range(ranks))
            for problem in problems
        )
    )


def simple_bound(case: Case, timeline: Timeline) -> float:
    """The work of the most loaded rank; of a makespan also the way of one micro-batch, forth and back."""
    made = timeline.schedule
    rows = [case.costs.ticks(made.ranks, made.stages).durations[kind] for kind in (Kind.F, Kind.I, Kind.W)]
    work = [0] * made.ranks
    for stage, rank in enumerate(made.rank_of):
        work[rank] += made.microbatches * sum(row[stage] for row in rows)
    hops = sum(here != there for here, there in pairwise(made.rank_of))
    way = sum(rows[0]) + sum(rows[1]) + rows[2][0] + 2 * hops * case.costs.ticks(made.ranks, made.stages).comm
    return timeline.time(max(*work, way if case.measure == "makespan" else 0))


def require_good(case: Case, found: Timeline) -> None:
    made, value = found.schedule, case.value(found)
    check(made, case.limit, case.costs.memory(made.ranks, made.stages))
    assert max(found.peak) <= case.limit + 1e-5
    assert made.bound is not None
    assert made.bound <= value
    assert simple_bound(case, found) <= value
    for name, policy in POLICIES.items():
        if case.chunks in (None, policy.chunks):
            other = case.play(name)
            assert max(other.peak) > case.limit or value <= case.value(other), name


@given(cases(ranks=4, microbatches=6))
def test_auto_finds_a_legal_schedule_within_the_limit_not_longer_than_any_policy(case: Case) -> None:
    require_good(case, case.search())


@pytest.mark.full
@settings(max_examples=300)
@given(cases(ranks=5, microbatches=10))
def test_auto_on_larger_pipelines_finds_legal_schedules_not_longer_than_any_policy(case: Case) -> None:
    require_good(case, case.search(budget=20_000))


@pytest.mark.parametrize(
    ("policy", "case"),
    [
        ("v-min", Case(4, 9, 2, Costs(1, 0.5, 1, 0.5, until_I=2, until_W=0.5), "makespan", 4)),
        pytest.param(
            *("v-min", Case(5, 13, None, Costs(0.5, 2, 0.5, 0.1, until_I=2, until_W=1), "makespan", 6)),
            marks=pytest.mark.full,
        ),
        ("zb-v", Case(2, 10, None, Costs(1, 0.5, 0.5, 0.5), "span", 2)),
    ],
)
def test_auto_finds_no_longer_schedule_than_a_v_pattern(policy: str, case: Case) -> None:
    pattern = case.play(policy)
    assert max(pattern.peak) <= case.limit
    assert case.value(case.search()) <= case.value(pattern)


TINY_PIPELINES = ((1, 3, 1), (2, 2, 1), (2, 4, 1), (3, 3, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2), (1, 2, 3))
"""Ranks, micro-batches and chunks."""


@st.composite
def tiny(draw: st.DrawFn) -> Case:
    ranks, microbatches, chunks = draw(st.sampled_from(TINY_PIPELINES))
    costs = draw(any_costs(ranks * chunks, growing=False))
    limit = draw(st.just(inf) | times().map(lambda more: least_limit(ranks, chunks, costs) + more))
    return Case(ranks, microbatches, chunks, costs, draw(st.sampled_from(MEASURES)), limit)


@given(tiny())
def test_auto_finds_the_optimum_of_tiny_pipelines_and_a_bound_equal_to_it(case: Case) -> None:
    ranks, microbatches, chunks, costs, measure, limit = case
    best = []
    for layout in layouts(chunks):
        unit = costs.memory(ranks, ranks * layout[1]).unit
        units = ROOMY if isinf(limit) else limit_in_units(limit, unit)
        problem = problem_of(layout, ranks, microbatches, costs, units, measure == "span")
        ticks = shortest(problem)
        best += [] if ticks is None else [ticks * problem.ticks.tick]
    found = case.search(nodes=20_000)
    assert case.value(found) == found.schedule.bound == float(min(best))


def test_the_bound_of_auto_equals_the_makespan_where_the_optimum_is_proven() -> None:
    assert searched(4, 8, chunks=1).schedule.bound == 27  # as zb-h1
    made = searched(2, 6, Costs(3, 4, 2, comm=1), 4, chunks=1)
    assert (made.makespan, made.schedule.bound) == (58, 58)


def test_the_bound_of_auto_is_over_all_numbers_of_chunks_it_may_choose() -> None:
    one, any_number = (searched(4, 8, chunks=chunks).schedule.bound for chunks in (1, None))
    assert one == 27
    assert any_number == 24.75


def test_auto_with_too_few_search_nodes_proves_no_bound() -> None:
    # 31 is the best there is, but no bound says so.
    case = Case(4, 8, 1, Costs(), "makespan", 3)
    found = [case.search(budget=50_000, nodes=nodes) for nodes in (0, 50, 20_000)]
    assert [timeline.makespan for timeline in found] == [31, 31, 31]
    assert [timeline.schedule.bound for timeline in found] == [28, 28, 31]


def test_the_policy_name_of_auto_tells_the_placement_of_stages() -> None:
    assert searched(4, 8, chunks=1).schedule.policy == "auto (linear)"
    # A rank of a v has the first stage and the last: with a hop that costs, its way is shorter.
    v = searched(2, 4, Costs(comm=2), chunks=2)
    assert (v.schedule.policy, v.schedule.rank_of) == ("auto (v, 2 chunks)", (0, 1, 1, 0))
    # With all the work in the stages that a v puts on one rank, a loop is the shorter one.
    loop = searched(2, 4, Costs([1, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 1]))
    assert (loop.schedule.policy, loop.schedule.rank_of) == ("auto (loop, 2 chunks)", (0, 1, 0, 1))


def alone(problems: list[Problem], budget: float) -> list[Candidate]:
    """A local search that ends with one micro-batch after the other."""
    (problem,) = problems
    rows = " ".join(f"F{number} I{number} W{number}" for number in range(problem.microbatches))
    orders = operations(problem, *[rows] * problem.ranks)
    return [
        Candidate(
            problem,
            InitialOrder("alone"),
            DispatchRule(),
            list_schedule(problem.tables, orders, 1, DispatchRule()),
        )
    ]


def test_a_named_policy_wins_where_nothing_better_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_search, "local_search", alone)
    monkeypatch.setattr(auto_search, "EXACT_SIZE", 0)

    def won(limit: float, costs: Costs | None = None) -> tuple[str, float]:
        found = schedule("auto", ranks=4, microbatches=8, chunks=1, costs=costs, limit=limit)
        return found.policy, max(simulate(found).peak)

    assert won(1) == ("auto (linear)", 1)
    assert won(4) == ("auto (zb-h1)", 4)
    assert won(7) == ("auto (zb-h2)", 7)  # the same makespan, and a shorter span
    assert won(4, Costs(1, 1, 0)) == ("auto (1f1b)", 4)


def test_auto_prefers_the_shorter_span_of_equal_makespans() -> None:
    wide = searched(4, 8, chunks=1, limit=7, budget=50_000)
    assert (wide.makespan, wide.span) == (27, 24)
    assert searched(4, 8, chunks=1, limit=7, measure="span").span == 24


def test_auto_joins_input_and_weight_gradients_where_that_delays_nothing() -> None:
    made = searched(1, 3).schedule
    assert made.order == (("0F0", "0B0", "0F1", "0B1", "0F2", "0B2"),)
    assert made.bound == 9


@pytest.mark.parametrize("limit", [inf, 1e30, 8, 100.5])
def test_auto_with_a_large_memory_limit_finds_the_schedule_without_one(limit: float) -> None:
    assert searched(2, 4, limit=limit).schedule == searched(2, 4, limit=inf).schedule


def test_autos_default_memory_limit_is_that_of_1f1b() -> None:
    assert searched(3, 6).schedule == searched(3, 6, limit=3).schedule
    assert max(searched(3, 6).peak) <= 3


@pytest.mark.parametrize("limit", [3.333333, 10 / 3])
def test_a_limit_in_decimals_admits_thirds_that_are_written_out(limit: float) -> None:
    peak = max(searched(4, 8, chunks=3, limit=limit, budget=20_000).peak)
    assert peak <= limit + 1e-5
    assert peak == pytest.approx(10 / 3 if limit == 10 / 3 else 3)


def test_auto_takes_the_chunks_that_costs_per_stage_imply() -> None:
    assert searched(2, 3, Costs([1, 1, 1, 1])).schedule.stages == 4
    assert searched(2, 3, Costs(until_I=[0.5] * 4, until_W=[0.5] * 4)).schedule.stages == 4
    assert searched(2, 3, Costs([1] * 10, 1, 1)).schedule.stages == 10  # more chunks than are tried unasked


def test_auto_gives_the_same_schedule_for_the_same_arguments() -> None:
    case = Case(3, 7, None, Costs(1.1, 1.3, 0.8, 0.1), "makespan", 3.5)
    assert case.search(budget=20_000) == case.search(budget=20_000)


EDGES = {
    "costs": (Costs(0, 0, 0), Costs(0, 0, 0, 0, 0, 0), Costs(0, 1, 0), Costs(1, 0, 0, 5)),
    "ranks": (1, 2, 5),
    "microbatches": (1, 3),
    "measure": MEASURES,
}
COVERING = covering_rows(EDGES)


def require_good_at_the_edge(
    costs: Costs, ranks: int, microbatches: int, measure: auto_search.Measure
) -> None:
    limit = float(max(costs.memory(ranks, ranks).until_input))
    for each in (limit, inf):
        case = Case(ranks, microbatches, None, costs, measure, each)
        require_good(case, case.search())


@pytest.mark.parametrize("row", in_quick(COVERING, *COVERING[::2]))
def test_auto_handles_extreme_costs_and_counts(row: Row) -> None:
    require_good_at_the_edge(**row)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in every_row(EDGES) if row not in COVERING])
def test_auto_handles_all_other_extreme_costs_and_counts(row: Row) -> None:
    require_good_at_the_edge(**row)


def test_auto_handles_measured_costs_with_many_digits() -> None:
    costs = Costs(0.01852212345678901, 0.01808698765432109, 0.009337123456789, 6.012345678901234e-07)
    case = Case(2, 64, None, costs, "makespan", 2)
    require_good(case, case.search())
    large = Case(2, 8, 1, Costs(until_I=1.2345678901234567e6, until_W=3.0000000000000004e-09), "span", inf)
    require_good(large, large.search())


@pytest.mark.parametrize(
    ("ranks", "chunks", "costs", "limit", "least"),
    [
        (4, None, Costs(), 0.5, "1"),
        (4, None, Costs(), 0, "1"),
        (2, 1, Costs(until_I=0.25, until_W=0.75), 0.7, "0.75"),
        # One chunk holds 2 while it turns; of two, only one turns at a time: 1, and 0.5 for the other.
        (2, None, Costs(until_I=1, until_W=2), 0.5, "1.25"),
        (2, 2, Costs(until_I=[1, 2, 3, 4], until_W=0), 3.9, "5"),
        (1, 2, Costs(until_I=[1, 2], until_W=[4, 0]), 3.9, "4"),
    ],
)
def test_refuses_a_limit_below_what_any_schedule_needs(
    ranks: int, chunks: int | None, costs: Costs, limit: float, least: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        searched(ranks, 3, costs, limit, chunks)
    assert str(caught.value) == (f"limit is {limit:g}, less than any schedule needs: give at least {least}.")
    found = searched(ranks, 3, costs, float(least), chunks)
    assert max(found.peak) == float(least)


def test_refuses_costs_for_other_stages() -> None:
    with pytest.raises(ScheduleError, match=r"costs\.F has 3 values, but the schedule has 2 stages"):
        searched(2, 3, Costs([1, 1, 1]))
    with pytest.raises(ScheduleError, match=r"costs\.I has 2 values, but the schedule has 4 stages"):
        searched(2, 3, Costs(1, [1, 1]), chunks=2)
    with pytest.raises(ScheduleError, match=r"costs\.\w has \d values, but the schedule has \d stages"):
        searched(2, 3, Costs([1] * 4, [1] * 2))
