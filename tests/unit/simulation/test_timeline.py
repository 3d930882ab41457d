"""The simulator against closed forms, published figures and a timeline worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.schedules.action import Action
from plait.schedules.policies import schedule
from plait.schedules.schedule import Schedule
from plait.simulation.costs import Costs
from plait.simulation.timeline import Timeline, simulate

tenths = st.integers(0, 50).map(lambda number: number / 10)


def written(*rows: str, rank_of: tuple[int, ...], microbatches: int) -> Schedule:
    """The schedule whose ranks do `rows`, as in `"0F0 0B0"`."""
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("written", microbatches, rank_of, actions)


def shown(timeline: Timeline) -> list[str]:
    return [" ".join(f"{action}:{start:g}-{end:g}" for action, start, end in row) for row in timeline.events]


@pytest.mark.parametrize(
    ("policy", "ranks", "microbatches", "makespan", "bubble", "peak"),
    [
        ("gpipe", 4, 8, 33.0, 0.272727, (8.0,) * 4),
        ("1f1b", 4, 8, 33.0, 0.272727, (4.0, 3.0, 2.0, 1.0)),
        ("gpipe", 8, 24, 93.0, 0.225806, (24.0,) * 8),
        ("1f1b", 8, 24, 93.0, 0.225806, (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)),
        ("1f1b", 4, 2, 15.0, 0.6, (2.0, 2.0, 2.0, 1.0)),
        ("1f1b", 1, 3, 9.0, 0.0, (1.0,)),
    ],
)
def test_equal_costs(
    policy: str, ranks: int, microbatches: int, makespan: float, bubble: float, peak: tuple[float, ...]
) -> None:
    timeline = simulate(schedule(policy, ranks=ranks, microbatches=microbatches))
    assert (timeline.makespan, timeline.span, timeline.peak) == (makespan, makespan, peak)
    assert (round(timeline.bubble, 6), round(timeline.bubble_span, 6)) == (bubble, bubble)
    assert timeline.idle == (makespan - 3 * microbatches,) * ranks


@given(p=st.integers(1, 6), rounds=st.integers(1, 4), f=tenths, i=tenths, w=tenths, comm=tenths)
def test_closed_forms(p: int, rounds: int, f: float, i: float, w: float, comm: float) -> None:
    work = f + i + w
    costs = Costs(f, i, w, comm)
    m = p * rounds
    gpipe = simulate(schedule("gpipe", ranks=p, microbatches=m + 1), costs)
    assert gpipe.makespan == pytest.approx((m + p) * work + 2 * (p - 1) * comm)
    one_by_one = simulate(schedule("1f1b", ranks=p, microbatches=m), costs)
    if p > 1 and 2 * comm <= f + i + w:
        expected = m * work + (p - 1) * work + 2 * comm * ((p - 1) * m / p + p - 2)
        assert one_by_one.makespan == pytest.approx(expected)
    assert one_by_one.peak == tuple(float(p - rank) for rank in range(p))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs", "bubble"),
    [
        (8, 24, Costs(18.522, 18.086, 9.337, 0.601), 0.2431),
        (8, 64, Costs(18.546, 18.097, 9.321, 0.762), 0.1240),
        (8, 32, Costs(29.802, 29.428, 19.53, 0.577), 0.1898),
        (16, 48, Costs(11.347, 11.248, 8.132, 0.377), 0.2552),
        (16, 128, Costs(11.325, 11.308, 8.109, 0.378), 0.1251),
        (32, 128, Costs(10.408, 10.204, 7.703, 0.408), 0.2168),
    ],
)
def test_1f1b_in_the_zero_bubble_paper(ranks: int, microbatches: int, costs: Costs, bubble: float) -> None:
    timeline = simulate(schedule("1f1b", ranks=ranks, microbatches=microbatches), costs)
    assert round(timeline.bubble_span, 4) == bubble


def test_split_backward_with_hops() -> None:
    rows = "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    timeline = simulate(written(*rows, rank_of=(0, 1), microbatches=3), Costs(1, 2, 1, 0.5))
    assert shown(timeline) == [
        "0F0:0-1 0F1:1-2 0I0:5-7 0W0:7-8 0F2:8-9 0I1:9-11 0W1:11-12 0I2:13-15 0W2:15-16",
        "1F0:1.5-2.5 1I0:2.5-4.5 1F1:4.5-5.5 1I1:5.5-7.5 1W0:7.5-8.5 1F2:9.5-10.5 1I2:10.5-12.5 "
        "1W1:12.5-13.5 1W2:13.5-14.5",
    ]
    assert (timeline.makespan, timeline.span, timeline.bubble_span) == (16.0, 16.0, 0.25)
    assert timeline.peak == (2.0, 2.0)
    assert timeline.idle == (4.0, 4.0)
    assert timeline.idle_span == (4.0, 1.0)


def test_a_full_backward_hands_its_gradient_on_at_its_end() -> None:
    timeline = simulate(written("0F0 0B0", "1F0 1B0", rank_of=(0, 1), microbatches=1), Costs(1, 2, 3))
    assert shown(timeline) == ["0F0:0-1 0B0:7-12", "1F0:1-2 1B0:2-7"]


def test_hops_are_between_different_ranks_only_and_chunks_count_their_part() -> None:
    rows = "0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0"
    timeline = simulate(written(*rows, rank_of=(0, 1, 1, 0), microbatches=1), Costs(2, 2, 2, comm=1))
    assert shown(timeline) == [
        "0F0:0-1 3F0:5-6 3I0:6-7 3W0:7-8 0B0:13-15",
        "1F0:2-3 2F0:3-4 2B0:8-10 1B0:10-12",
    ]
    assert timeline.peak == (1.0, 1.0)
    assert timeline.span == 15.0
    assert timeline.bubble == 18 / 30
    assert timeline.bubble_span == 9 / 15


def test_stages_of_unequal_cost() -> None:
    stages = (1, 1, 1, 2)
    timeline = simulate(schedule("1f1b", ranks=4, microbatches=8), Costs(stages, stages, stages))
    assert (timeline.makespan, timeline.span, round(timeline.bubble, 6)) == (57.0, 57.0, 0.473684)
    assert timeline.bubble_span == 9 / 57
    assert timeline.idle_span == (33.0, 30.0, 27.0, 0.0)


def test_decimal_costs_add_up_exactly() -> None:
    timeline = simulate(schedule("1f1b", ranks=1, microbatches=10), Costs(0.1, 0, 0))
    assert timeline.makespan == 1.0
    assert [end for _, _, end in timeline.events[0][::2]][:3] == [0.1, 0.2, 0.3]


def test_no_cost_is_no_bubble() -> None:
    timeline = simulate(schedule("gpipe", ranks=2, microbatches=2), Costs(0, 0, 0))
    assert (timeline.makespan, timeline.bubble, timeline.bubble_span) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "microbatches", "message"),
    [
        (
            ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
            2,
            "rank 0 waits at 0B0 for 1I0, which never comes, as 1 more wait; ",
        ),
        (("0F0 0W0 0I0", "1F0 1I0 1W0"), 1, "rank 0 waits at 0W0 for 0I0, which never comes; "),
        (("0B0 0F0", "1F0 1B0"), 1, "rank 0 waits at 0B0 for 0F0, which never comes, as 1 more wait; "),
    ],
)
def test_says_where_it_is_stuck(rows: tuple[str, str], microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(written(*rows, rank_of=(0, 1), microbatches=microbatches))
