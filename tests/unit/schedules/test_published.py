"""Figures that others published, to the digits that they gave, and closed forms over many sizes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.action import Action
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule_by_policy import schedule

tenths = st.integers(0, 50).map(lambda number: number / 10)
"""Costs, as decimals."""


DOWN_FROM_4 = (4.0, 3.0, 2.0, 1.0)
DOWN_FROM_8 = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
BY_TWOS_4 = (7.0, 5.0, 3.0, 1.0)
BY_TWOS_8 = (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0)
HALVES_4 = (5.5, 4.5, 3.5, 2.5)
HALVES_8 = (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)
QUARTERS_4 = (4.75, 4.25, 3.75, 3.25)
QUARTERS_8 = (9.75, 9.25, 8.75, 8.25, 7.75, 7.25, 6.75, 6.25)


@pytest.mark.parametrize(
    ("made", "makespan", "span", "bubbles", "peak", "until_inputs"),
    [
        (policy_schedule("gpipe", 4, 8), 33.0, 33.0, (0.272727, 0.272727), (8.0,) * 4, (8.0,) * 4),
        (policy_schedule("1f1b", 4, 8), 33.0, 33.0, (0.272727, 0.272727), DOWN_FROM_4, DOWN_FROM_4),
        (policy_schedule("zb-h1", 4, 8), 27.0, 27.0, (0.111111, 0.111111), (4.0,) * 4, DOWN_FROM_4),
        (policy_schedule("zb-h2", 4, 8), 27.0, 24.0, (0.111111, 0.0), (7.0,) * 4, BY_TWOS_4),
        (policy_schedule("interleaved", 4, 8, 2), 28.5, 28.5, (0.157895, 0.157895), HALVES_4, HALVES_4),
        (policy_schedule("interleaved", 4, 8, 4), 26.25, 26.25, (0.085714, 0.085714), QUARTERS_4, QUARTERS_4),
        (policy_schedule("gpipe", 8, 24), 93.0, 93.0, (0.225806, 0.225806), (24.0,) * 8, (24.0,) * 8),
        (policy_schedule("1f1b", 8, 24), 93.0, 93.0, (0.225806, 0.225806), DOWN_FROM_8, DOWN_FROM_8),
        (policy_schedule("zb-h1", 8, 24), 79.0, 79.0, (0.088608, 0.088608), (8.0,) * 8, DOWN_FROM_8),
        (policy_schedule("zb-h2", 8, 24), 79.0, 72.0, (0.088608, 0.0), (15.0,) * 8, BY_TWOS_8),
        (policy_schedule("interleaved", 8, 24, 2), 82.5, 82.5, (0.127273, 0.127273), HALVES_8, HALVES_8),
        (
            policy_schedule("interleaved", 8, 24, 4),
            77.25,
            77.25,
            (0.067961, 0.067961),
            QUARTERS_8,
            QUARTERS_8,
        ),
    ],
)
def test_with_equal_costs_each_policy_has_the_published_makespan_bubble_and_peak(
    made: Schedule,
    makespan: float,
    span: float,
    bubbles: tuple[float, float],
    peak: tuple[float, ...],
    until_inputs: tuple[float, ...],
) -> None:
    timeline = simulate(made)
    assert (timeline.makespan, timeline.span) == (makespan, span)
    assert (round(timeline.bubble, 6), round(timeline.bubble_span, 6)) == bubbles
    assert timeline.peak == peak
    assert simulate(made, Costs(until_W=0)).peak == until_inputs


# Closed forms: p ranks, m micro-batches, v chunks; f, i, w and c the costs, T = f + i + w.


@given(p=st.integers(1, 6), m=st.integers(1, 20), f=tenths, i=tenths, w=tenths, c=tenths)
def test_the_makespan_of_gpipe_is_that_of_the_formula(
    p: int, m: int, f: float, i: float, w: float, c: float
) -> None:
    timeline = simulate(policy_schedule("gpipe", p, m), Costs(f, i, w, c))
    assert timeline.makespan == pytest.approx((m + p - 1) * (f + i + w) + 2 * (p - 1) * c)


@given(p=st.integers(2, 6), rounds=st.integers(1, 4), f=tenths, i=tenths, w=tenths, part=st.integers(0, 10))
def test_the_makespan_of_1f1b_is_that_of_the_formula(
    p: int, rounds: int, f: float, i: float, w: float, part: int
) -> None:
    """Where micro-batches fill the ranks, and a hop takes at most half of T."""
    m, total = p * rounds, f + i + w
    c = round(total / 2 * part / 10, 6)
    timeline = simulate(policy_schedule("1f1b", p, m), Costs(f, i, w, c))
    expected = m * total + (p - 1) * total + 2 * c * ((p - 1) * m / p + p - 2)
    assert timeline.makespan == pytest.approx(expected)


@given(p=st.integers(1, 6), rounds=st.integers(1, 4), v=st.integers(1, 4), f=tenths, i=tenths, w=tenths)
def test_the_makespan_of_interleaved_is_that_of_the_formula(
    p: int, rounds: int, v: int, f: float, i: float, w: float
) -> None:
    """Where micro-batches fill the ranks and hops are free."""
    m, total = p * rounds, f + i + w
    timeline = simulate(policy_schedule("interleaved", p, m, v), Costs(f, i, w))
    assert timeline.makespan == pytest.approx(m * total + (p - 1) * total / v)


@st.composite
def zero_bubble_sizes(draw: st.DrawFn, most_comm: float) -> tuple[int, int, Costs]:
    """Enough micro-batches; a weight gradient is the shortest work, and a hop at most so much of it."""
    p = draw(st.integers(1, 6))
    m = draw(st.integers(2 * p - 1, 3 * p + 4))
    w = draw(st.integers(0, 20))
    f, i = w + draw(st.integers(0, 20)), w + draw(st.integers(0, 20))
    c = draw(st.integers(0, 10)) * most_comm * w / 10
    return p, m, Costs(f, i, w, c)


@given(zero_bubble_sizes(most_comm=0.5))
def test_the_makespan_of_zb_h1_is_that_of_the_formula(sizes: tuple[int, int, Costs]) -> None:
    p, m, costs = sizes
    f, i, w, c = costs.F, costs.I, costs.W, costs.comm
    timeline = simulate(policy_schedule("zb-h1", p, m), costs)
    assert timeline.makespan == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w + 4 * c))


@given(zero_bubble_sizes(most_comm=1))
def test_the_span_of_zb_h2_is_that_of_the_formula(sizes: tuple[int, int, Costs]) -> None:
    p, m, costs = sizes
    f, i, w, c = costs.F, costs.I, costs.W, costs.comm
    timeline = simulate(policy_schedule("zb-h2", p, m), costs)
    assert timeline.span == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - 2 * w + 2 * c))


@given(p=st.integers(1, 6), more=st.integers(0, 10), f=tenths)
def test_zb_h2_has_no_bubble_where_all_work_costs_the_same(p: int, more: int, f: float) -> None:
    assume(f > 0)
    m = 2 * p - 1 + more
    timeline = simulate(policy_schedule("zb-h2", p, m), Costs(f, f, f))
    assert timeline.makespan == pytest.approx(3 * m * f + (p - 1) * f)
    assert timeline.bubble_span == 0


@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs", "bubbles"),
    [
        (8, 24, Costs(18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
        (8, 64, Costs(18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
        (8, 32, Costs(29.802, 29.428, 19.53, 0.577), (0.1898, 0.1045, 0.0559)),
        (16, 48, Costs(11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
        (16, 128, Costs(11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
        (32, 128, Costs(10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
        # With the costs of zb-v's chunks, twice: a rank's.
        (16, 48, Costs(28.814, 28.76, 19.352, 1.61), (0.2668, 0.1536, 0.0823)),
        (24, 72, Costs(13.526, 13.938, 10.502, 0.755), (0.2699, 0.1439, 0.0628)),
        (32, 96, Costs(18.916, 19.496, 14.576, 0.879), (0.2676, 0.1429, 0.0629)),
    ],
)
def test_simulated_bubbles_equal_those_of_the_zero_bubble_paper(
    ranks: int, microbatches: int, costs: Costs, bubbles: tuple[float, float, float]
) -> None:
    for policy, bubble in zip(("1f1b", "zb-h1", "zb-h2"), bubbles, strict=True):
        timeline = simulate(policy_schedule(policy, ranks, microbatches), costs)
        assert round(timeline.bubble_span, 4) == bubble


@pytest.mark.parametrize(
    ("ranks", "costs", "bubble"),
    [
        (16, Costs(28.814, 28.76, 19.352, 1.61), 0.0697),
        pytest.param(24, Costs(13.526, 13.938, 10.502, 0.755), 0.0638, marks=pytest.mark.full),
        pytest.param(32, Costs(18.916, 19.496, 14.576, 0.879), 0.0593, marks=pytest.mark.full),
    ],
)
def test_zb_v_is_as_short_as_published_or_shorter(ranks: int, costs: Costs, bubble: float) -> None:
    made = schedule("zb-v", ranks=ranks, microbatches=3 * ranks, costs=costs, limit=ranks)
    assert round(simulate(made, costs).bubble_span, 4) <= bubble


def test_the_timeline_of_zb_h1_with_unequal_costs_is_the_one_written_by_hand() -> None:
    timeline = simulate(policy_schedule("zb-h1", 2, 3), Costs(1, 2, 1, 0.5))
    rows = [" ".join(f"{action}:{start:g}-{end:g}" for action, start, end in row) for row in timeline.events]
    assert rows == [
        "0F0:0-1 0F1:1-2 0I0:5-7 0W0:7-8 0F2:8-9 0I1:9-11 0W1:11-12 0I2:13-15 0W2:15-16",
        "1F0:1.5-2.5 1I0:2.5-4.5 1F1:4.5-5.5 1I1:5.5-7.5 1W0:7.5-8.5 1F2:9.5-10.5 1I2:10.5-12.5 "
        "1W1:12.5-13.5 1W2:13.5-14.5",
    ]
    assert (timeline.makespan, timeline.span) == (16.0, 16.0)


def test_a_last_stage_of_twice_the_cost_gives_the_makespan_and_idle_times_by_hand() -> None:
    stages = (1, 1, 1, 2)
    timeline = simulate(policy_schedule("1f1b", 4, 8), Costs(stages, stages, stages))
    assert (timeline.makespan, timeline.span, round(timeline.bubble, 6)) == (57.0, 57.0, 0.473684)
    assert timeline.idle_span == (33.0, 30.0, 27.0, 0.0)
    assert timeline.bubble_span == 9 / 57


@pytest.mark.parametrize(
    ("rows", "microbatches", "told"),
    [
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), 2, "rule 'no deadlock' is broken on rank 0 by 0B0: "),
        (("0F0 0I0 0W0", "1F0 1I0"), 1, "rule 'every action once' is broken on rank 1 by 1W0: it is missing"),
        (("0F0 0W0 0I0", "1F0 1I0 1W0"), 1, "rule 'forward, input, weights' is broken on rank 0 by 0W0: "),
    ],
)
def test_orders_that_cannot_run_are_refused(rows: tuple[str, ...], microbatches: int, told: str) -> None:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError, match=told):
        check(Schedule("written", microbatches, (0, 1), actions))
