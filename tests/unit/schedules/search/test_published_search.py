"""What the search finds, beside what others have found and published. No figure here is the project's own."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
from search_cases import LINEAR, LOOP, ROOMY, V, problem_of, require_legal, schedule_of, searched

from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.costs import Costs
from plait.schedules.search.auto_search import Measure
from plait.schedules.search.exact_search import exact_search
from plait.schedules.search.problem import StageLayout
from plait.schedules.search.schedule_by_policy import schedule

EXACT_OPTIMA = [
    # Layout, ranks, micro-batches; F, I and W of a chunk, and comm; the limit in chunks; the least makespan,
    # by exhaustive search.
    (LINEAR, 3, 4, (1, 1, 1, 0), 2, 17),
    (LINEAR, 4, 4, (1, 1, 1, 0), 3, 18),
    pytest.param(*(LINEAR, 4, 6, (1, 1, 1, 0), 3, 24), marks=pytest.mark.full),
    pytest.param(*(LINEAR, 4, 8, (1, 1, 1, 0), 3, 31), marks=pytest.mark.full),
    (LINEAR, 3, 6, (1, 1, 1, 0), 2, 25),
    (LINEAR, 3, 4, (1, 2, 1, 0), 3, 20),
    (LINEAR, 3, 4, (2, 2, 1, 1), 3, 34),
    pytest.param(*(LINEAR, 3, 6, (2, 2, 1, 0), 4, 35), marks=pytest.mark.full),
    (LINEAR, 2, 6, (3, 4, 2, 1), 4, 58),
    (LINEAR, 3, 6, (1, 2, 1, 0), 3, 28),
    (LINEAR, 3, 4, (1, 1, 2, 0), 2, 20),
    (LINEAR, 2, 4, (2, 2, 1, 1), 2, 27),
    (V, 2, 3, (1, 1, 1, 0), 2, 25),
    (V, 2, 4, (1, 1, 1, 0), 2, 33),
    pytest.param(*(V, 3, 4, (1, 1, 1, 0), 3, 36), marks=pytest.mark.full),
    (V, 3, 4, (1, 1, 1, 0), 6, 26),
    pytest.param(*(V, 3, 3, (1, 1, 1, 0), 4, 23), marks=pytest.mark.full),
    pytest.param(*(V, 2, 4, (1, 1, 1, 1), 4, 29), marks=pytest.mark.full),
    (V, 2, 3, (2, 2, 1, 1), 4, 37),
    (LOOP, 2, 4, (1, 1, 1, 0), 4, 25),
]
EQUAL = Costs()
NEARLY_EQUAL = Costs(1, 1, 0.9, comm=0.1)
MEASURED = Costs(18.522, 18.086, 9.337, comm=0.601)
"""Of a GPT model of 1.5 billion parameters, in milliseconds: table 6 of the zero-bubble paper, see below."""
BEST_KNOWN = [
    # Of 4 ranks and 8 micro-batches, in any layout: costs, limit, and the shortest makespan that other
    # programs reach: PyTorch's schedules, those of the zero-bubble papers' authors, and list scheduling.
    pytest.param(*(NEARLY_EQUAL, 6, 24.3), marks=pytest.mark.full),
    pytest.param(*(MEASURED, 6, 385.663), marks=pytest.mark.full),
    (EQUAL, 4, 24.75),
]
MORE_BEST_KNOWN = [
    (NEARLY_EQUAL, 3, 28.15),
    (NEARLY_EQUAL, 4, 25.6),  # PyTorch's best: 26.0
    (NEARLY_EQUAL, 5, 25.0),  # PyTorch's best: 26.0
    (MEASURED, 3, 449.832),
    (MEASURED, 4, 402.437),
    (MEASURED, 5, 391.766),
    (EQUAL, 2, 29.5),
    (EQUAL, 3, 25.75),
]
"""With other limits."""


class Row(NamedTuple):
    """A row of the tables of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", on automatic scheduling."""

    ranks: int
    microbatches: int
    times: tuple[float, float, float, float]
    """F, I, W and comm as they were measured, in milliseconds."""
    until_weight: float
    """What is held after the input gradient, where 1 is held before it."""
    bubbles: tuple[float, float]
    """The part of the longest rank's span that is no work, with 1 and 2 times the memory of 1f1b."""


ZERO_BUBBLE = Row(8, 24, (18.522, 18.086, 9.337, 0.601), 0.36641, (0.1585, 0.0433))
MORE_ZERO_BUBBLE = [
    Row(8, 32, (29.802, 29.428, 19.530, 0.577), 0.43243, (0.1045, 0.0022)),
    Row(8, 64, (18.546, 18.097, 9.321, 0.762), 0.36641, (0.0674, 0.0026)),
    Row(16, 48, (11.347, 11.248, 8.132, 0.377), 0.43243, (0.1397, 0.0066)),
    Row(16, 128, (11.325, 11.308, 8.109, 0.378), 0.43243, (0.0576, 0.0028)),
    Row(32, 128, (10.408, 10.204, 7.703, 0.408), 0.43243, (0.1106, 0.0029)),
]


@cache
def found(
    ranks: int,
    microbatches: int,
    costs: Costs,
    limit: float,
    chunks: int | None = None,
    measure: Measure = "makespan",
) -> Timeline:
    """With all the budget that a user gets."""
    made = schedule(
        "auto",
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        costs=costs,
        limit=limit,
        measure=measure,
    )
    timeline = simulate(made, costs)
    assert max(timeline.peak) <= limit + 1e-5
    return timeline


@pytest.mark.parametrize(("layout", "ranks", "microbatches", "times", "limit", "best"), EXACT_OPTIMA)
def test_exact_search_and_auto_reach_the_listed_optima(
    layout: StageLayout, ranks: int, microbatches: int, times: tuple[float, ...], limit: int, best: float
) -> None:
    chunks = layout[1]
    forward, inputs, weights, comm = times
    costs = Costs(chunks * forward, chunks * inputs, chunks * weights, comm)
    exact = exact_search(problem_of(layout, ranks, microbatches, costs, limit), ROOMY, nodes=20_000)
    assert exact.proven
    assert exact.orders is not None
    problem = problem_of(layout, ranks, microbatches, costs, limit)
    require_legal(problem, exact.orders)
    assert simulate(schedule_of(problem, exact.orders), costs).makespan == best
    # Over both layouts of so many chunks it may be shorter still.
    auto = searched(ranks, microbatches, costs, limit / chunks, chunks, budget=20_000, nodes=20_000)
    assert auto.makespan <= best
    assert chunks > 1 or auto.makespan == auto.schedule.bound == best


@pytest.mark.parametrize(("costs", "limit", "best"), BEST_KNOWN)
def test_auto_reaches_the_best_known_makespans(costs: Costs, limit: float, best: float) -> None:
    assert found(4, 8, costs, limit).makespan <= best


@pytest.mark.full
@pytest.mark.parametrize(("costs", "limit", "best"), MORE_BEST_KNOWN)
def test_auto_reaches_the_best_known_makespans_under_other_limits(
    costs: Costs, limit: float, best: float
) -> None:
    assert found(4, 8, costs, limit).makespan <= best


@pytest.mark.parametrize(
    ("microbatches", "limit", "best"),
    [
        pytest.param(24, 8, 76.4, marks=pytest.mark.full),
        pytest.param(24, 10, 73.93, marks=pytest.mark.full),
        pytest.param(64, 8, 192.4, marks=pytest.mark.full),
        pytest.param(64, 10, 192.4 - 0.01, marks=pytest.mark.full),  # less than with the memory of 1f1b
    ],
)
def test_auto_is_not_longer_than_pytorchs_best_schedule_on_eight_ranks(
    microbatches: int, limit: float, best: float
) -> None:
    assert found(8, microbatches, NEARLY_EQUAL, limit).makespan <= best


def bubble(row: Row, multiple: int) -> float:
    forward, inputs, weights, comm = row.times
    costs = Costs(forward, inputs, weights, comm, until_I=1, until_W=row.until_weight)
    timeline = found(row.ranks, row.microbatches, costs, multiple * row.ranks, 1, "span")
    return round(timeline.bubble_span, 4)


@pytest.mark.parametrize("multiple", [1, pytest.param(2, marks=pytest.mark.full)])
def test_auto_has_no_larger_bubble_than_the_zero_bubble_paper(multiple: int) -> None:
    assert bubble(ZERO_BUBBLE, multiple) <= ZERO_BUBBLE.bubbles[multiple - 1]


@pytest.mark.full
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("row", MORE_ZERO_BUBBLE)
def test_auto_has_no_larger_bubble_than_the_zero_bubble_paper_on_larger_pipelines(
    row: Row, multiple: int
) -> None:
    assert bubble(row, multiple) <= row.bubbles[multiple - 1]
