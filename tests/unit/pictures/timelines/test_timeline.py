"""The simulator against timelines worked out by hand (see `test_published` for figures of others)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.pictures.timelines.timeline_files import picture
from plait.schedules.action import Action
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, policy_schedule
from plait.schedules.schedule import Schedule

tenths = st.integers(0, 50).map(lambda number: number / 10)


def written(*rows: str, rank_of: tuple[int, ...], microbatches: int) -> Schedule:
    """The schedule whose ranks do `rows`, as in `"0F0 0B0"`."""
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("written", microbatches, rank_of, actions)


def shown(timeline: Timeline) -> list[str]:
    return [" ".join(f"{action}:{start:g}-{end:g}" for action, start, end in row) for row in timeline.events]


def test_a_split_backward_with_hops_gives_the_timeline_by_hand() -> None:
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


def test_a_notebook_shows_the_picture_and_a_terminal_one_line() -> None:
    timeline = simulate(policy_schedule("zb-h1", ranks=2, microbatches=4))
    assert timeline._repr_svg_() == picture(timeline, "svg")
    assert repr(timeline) == "Timeline(zb-h1: 2 ranks, 4 micro-batches; makespan 13, bubble 7.7%)"


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


def test_makespan_span_bubble_and_idle_times_are_those_computed_by_hand() -> None:
    """Rank 0 starts first, rank 1 has most to do, and rank 2 is there for the shortest time."""
    rows = "0F0 0B0", "1F0 1B0", "2F0 2B0"
    costs = Costs(F=(1, 4, 2), I=(1, 3, 1), W=(0, 2, 1))
    timeline = simulate(written(*rows, rank_of=(0, 1, 2), microbatches=1), costs)
    assert shown(timeline) == ["0F0:0-1 0B0:14-15", "1F0:1-5 1B0:9-14", "2F0:5-7 2B0:7-9"]
    assert timeline.makespan == 15
    assert timeline.span == 15
    assert timeline.bubble == (3 * 15 - 2 - 9 - 4) / (3 * 15)
    assert timeline.bubble_span == (15 - 9) / 15
    assert timeline.idle == (13, 6, 11)
    assert timeline.idle_span == (13, 4, 0)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "makespan", "bubble", "peak"),
    [
        (4, 2, 15.0, 0.6, (2.0, 2.0, 2.0, 1.0)),  # fewer micro-batches than ranks
        (1, 3, 9.0, 0.0, (1.0,)),
        (2, 1, 6.0, 0.5, (1.0, 1.0)),
    ],
)
def test_1f1b_with_few_micro_batches_or_ranks_has_the_listed_measures(
    ranks: int, microbatches: int, makespan: float, bubble: float, peak: tuple[float, ...]
) -> None:
    timeline = simulate(policy_schedule("1f1b", ranks, microbatches))
    assert (timeline.makespan, timeline.span, timeline.peak) == (makespan, makespan, peak)
    assert (timeline.bubble, timeline.bubble_span) == (bubble, bubble)
    assert timeline.idle == (makespan - 3 * microbatches,) * ranks


def test_a_span_may_be_shorter_than_the_makespan() -> None:
    timeline = simulate(policy_schedule("zb-h2", 4, 8))
    assert (timeline.makespan, timeline.span) == (27, 24)
    assert (timeline.bubble, timeline.bubble_span) == (1 / 9, 0)
    assert timeline.idle == (3,) * 4
    assert timeline.idle_span == (0,) * 4


def test_a_rank_without_actions_is_idle_all_the_time() -> None:
    timeline = simulate(written("0F0 0B0", "", rank_of=(0,), microbatches=1), Costs([1], [1], [1]))
    assert (timeline.makespan, timeline.span, timeline.bubble, timeline.bubble_span) == (3, 3, 0.5, 0)
    assert (timeline.idle, timeline.idle_span, timeline.peak) == ((0, 3), (0, 0), (2, 0))


def test_chunks_that_are_neighbours_on_a_rank_hand_over_for_nothing() -> None:
    # Both ways through the middle of the v are free, and both ways between the ranks are not.
    rows = "0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"
    timeline = simulate(written(*rows, rank_of=(0, 1, 1, 0), microbatches=1), Costs(2, 2, 2, comm=0.5))
    assert shown(timeline) == [
        "0F0:0-1 3F0:4-5 3I0:5-6 0I0:9-10 3W0:10-11 0W0:11-12",
        "1F0:1.5-2.5 2F0:2.5-3.5 2I0:6.5-7.5 1I0:7.5-8.5 2W0:8.5-9.5 1W0:9.5-10.5",
    ]


def test_a_hop_occupies_neither_of_its_ranks() -> None:
    rows = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    timeline = simulate(written(*rows, rank_of=(0, 1), microbatches=2), Costs(comm=10))
    assert shown(timeline) == [
        "0F0:0-1 0F1:1-2 0B0:25-27 0B1:27-29",
        "1F0:11-12 1F1:12-13 1B0:13-15 1B1:15-17",
    ]


@given(
    st.sampled_from(sorted(POLICIES)), st.integers(1, 5), st.integers(1, 9), tenths, tenths, tenths, tenths
)
def test_measures_of_a_timeline_are_consistent_with_each_other(
    policy: str, ranks: int, microbatches: int, f: float, i: float, w: float, comm: float
) -> None:
    timeline = simulate(policy_schedule(policy, ranks, microbatches), Costs(f, i, w, comm))
    work = microbatches * (f + i + w)
    assert work <= timeline.span * (1 + 1e-9)
    assert timeline.span <= timeline.makespan
    assert 0 <= timeline.bubble_span <= timeline.bubble + 1e-9
    assert timeline.makespan * (1 - timeline.bubble) == pytest.approx(work)
    assert timeline.span * (1 - timeline.bubble_span) == pytest.approx(work)
    assert timeline.idle == pytest.approx([timeline.makespan - work] * ranks)
    for row, idle in zip(timeline.events, timeline.idle_span, strict=True):
        assert idle == pytest.approx(row[-1].end - row[0].start - work)


@pytest.mark.parametrize(
    ("policy", "costs", "peak"),
    [
        ("zb-h1", Costs(), (3, 3, 3)),
        ("zb-h1", Costs(until_W=0), (3, 2, 1)),
        ("zb-h1", Costs(until_W=0.5), (3, 2.5, 2)),
        ("zb-h1", Costs(until_I=0.5), (2, 2.5, 3)),
        ("1f1b", Costs(until_I=(2, 3, 4), until_W=(1, 1, 1)), (6, 6, 4)),
        ("interleaved", Costs(until_I=4, until_W=0), (16, 12, 8)),
    ],
)
def test_a_peak_is_what_the_costs_say_is_held(policy: str, costs: Costs, peak: tuple[float, ...]) -> None:
    assert simulate(policy_schedule(policy, 3, 6), costs).peak == peak


def test_decimal_costs_add_up_exactly() -> None:
    timeline = simulate(policy_schedule("1f1b", 1, 10), Costs(0.1, 0, 0))
    assert timeline.makespan == 1.0
    assert [end for _, _, end in timeline.events[0][::2]][:3] == [0.1, 0.2, 0.3]


def test_a_schedule_without_costs_has_no_bubble() -> None:
    timeline = simulate(policy_schedule("gpipe", 2, 2), Costs(0, 0, 0))
    assert (timeline.makespan, timeline.bubble, timeline.bubble_span) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "microbatches", "message"),
    [
        (
            ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
            2,
            "rank 0 waits at 0B0 for 1I0, which never runs, and 1 more wait; ",
        ),
        (("0F0 0W0 0I0", "1F0 1I0 1W0"), 1, "rank 0 waits at 0W0 for 0I0, which never runs; "),
        (("0B0 0F0", "1F0 1B0"), 1, "rank 0 waits at 0B0 for 0F0, which never runs, and 1 more wait; "),
    ],
)
def test_a_deadlocked_schedule_is_refused_naming_where_each_rank_waits(
    rows: tuple[str, str], microbatches: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(written(*rows, rank_of=(0, 1), microbatches=microbatches))


def test_an_action_of_an_unknown_stage_is_refused() -> None:
    made = written("0F0 7F0", rank_of=(0,), microbatches=1)
    with pytest.raises(ScheduleError, match=r"rank 0 runs 7F0, but rank_of names stages 0 to 0 only"):
        simulate(made)
