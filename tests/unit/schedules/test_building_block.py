"""Patterns: one period as a picture, and the steady state counted cell by cell."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED

from plait.schedules.building_block import BuildingBlock, Delays, Lengths, build_block, smallest_block
from plait.schedules.check import check
from plait.schedules.schedule import Placement, Schedule

PERIODS = {
    ("zb-v", 4, 2): [
        "F0 F1 I1 I0 W1 W0",
        "W0 F0 F1 I1 I0 W1",
    ],
    ("zb-v", 4, 3): [
        "F0 F1 I1 I0 W1 W0",
        "W0 F0 F1 I1 I0 W1",
        "W1 W0 F0 F1 I1 I0",
    ],
    ("v-half", 1, 2): [
        "F0 I0 W1 W0 F1 I1",
        "I1 F0 F1 I0 W1 W0",
    ],
    ("v-min", 0, 2): [
        "F0 I0 W0 F1 I1 W1",
        "I0 F0 F1 W1 W0 I1",
    ],
    ("v-min", 0, 3): [
        "F0 I0 I1 W1 W0 F1",
        "I0 F0 W0 I1 F1 W1",
        "W1 W0 F0 F1 I1 I0",
    ],
}
"""Name, pause and ranks; digits are chunks."""


def one_period(pattern: BuildingBlock) -> list[list[str]]:
    """What each rank does in each cell of the steady state; an action that takes two cells stands twice."""
    ranks = max(pattern.rank_of) + 1
    rows: list[list[str]] = [[""] * pattern.period for _ in range(ranks)]
    for kind, starts, lengths in zip("FIW", pattern.starts, pattern.lengths, strict=True):
        for stage, rank in enumerate(pattern.rank_of):
            for cell in range(starts[stage], starts[stage] + lengths[stage]):
                rows[rank][cell % pattern.period] += f"{kind}{stage // ranks}"
    return rows


@pytest.mark.parametrize(("name", "pause", "ranks"), PERIODS)
def test_one_period_of_the_tightest_v_pattern_is_the_published_one(name: str, pause: int, ranks: int) -> None:
    pattern = smallest_block(Placement.V.rank_of(ranks, 2), pause)
    assert [" ".join(row) for row in one_period(pattern)] == PERIODS[name, pause, ranks]


@pytest.mark.parametrize(
    ("pause", "peaks"),
    [
        # In chunks, for 2 to 12 ranks: all that zb-v may hold, a half and two chunks, a third and two.
        (4, [4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]),
        (1, [4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14]),
        (0, [4, 4, 4, 6, 6, 6, 8, 8, 8, 10, 10]),
    ],
)
def test_the_tightest_v_patterns_hold_the_published_memory(pause: int, peaks: list[int]) -> None:
    for ranks, peak in enumerate(peaks, start=2):
        pattern, ones = smallest_block(Placement.V.rank_of(ranks, 2), pause), (1,) * 2 * ranks
        assert pattern.peak(ones, ones) == held_in_steady_state(pattern, ones, ones) == peak


def test_a_pattern_starts_a_micro_batchs_actions_in_order_with_delays() -> None:
    lengths = Lengths((1, 1), (2, 2), (1, 1))
    assert build_block((0, 1), lengths, period=4, delays=Delays([0], [0], [0])) == BuildingBlock(
        (0, 1), lengths, 4, Lengths([0, 1], [5, 2], [7, 4])
    )
    assert build_block((0, 1), lengths, period=6, delays=Delays([2], [1], [3])) == BuildingBlock(
        (0, 1), lengths, 6, Lengths([0, 3], [10, 7], [13, 10])
    )


def test_a_period_too_short_for_the_actions_has_no_pattern() -> None:
    unit = Lengths((1, 1), (1, 1), (1, 1))
    assert build_block((0, 0), unit, period=6, delays=Delays([0, 0], [0, 0], [0, 0, 0])) is not None
    assert build_block((0, 0), unit, period=5, delays=Delays([0, 0], [0, 0], [0, 0, 0])) is None
    # Enough cells, but no two in a row.
    long = Lengths((1,), (1,), (2,))
    assert build_block((0,), long, period=4, delays=Delays([0], [0], [1])) is None


def test_the_latency_of_a_pattern_is_that_of_one_micro_batch() -> None:
    pattern = smallest_block(Placement.V.rank_of(2, 2), 0)
    assert pattern.starts == Lengths([0, 1, 2, 3], [7, 6, 5, 4], [8, 10, 9, 5])
    assert pattern.latency == 8


def test_orders_of_a_pattern_follow_its_start_times() -> None:
    lengths = Lengths((1, 1), (1, 1), (1, 1))
    pattern = BuildingBlock((0, 1), lengths, 3, Lengths([0, 1], [4, 2], [5, 3]))
    shown = [" ".join(map(str, row)) for row in pattern.orders(3)]
    assert shown == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
    ]


@st.composite
def patterns(draw: st.DrawFn) -> BuildingBlock:
    """Any that has room: placements, lengths, delays and periods at random."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = draw(st.sampled_from([Placement.LOOP, Placement.V]))

    def numbers(least: int, most: int, count: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    lengths = Lengths(*(numbers(1, 3, ranks * chunks) for _ in "FIW"))
    delays = Delays(numbers(0, 4, chunks), numbers(0, 4, chunks), numbers(0, 4, 2 * chunks - 1))
    found = build_block(
        placement.rank_of(ranks, chunks), lengths, draw(st.integers(3 * chunks, 9 * chunks)), delays
    )
    assume(found is not None)
    assert found is not None
    return found


@UNHURRIED
@given(patterns())
def test_no_two_actions_of_a_rank_collide_in_any_period(pattern: BuildingBlock) -> None:
    assert all(len(cell) <= 2 for row in one_period(pattern) for cell in row)


@UNHURRIED
@given(patterns())
def test_in_a_pattern_each_action_starts_after_its_inputs_are_done(pattern: BuildingBlock) -> None:
    (forwards, inputs, weights), lengths = pattern.starts, pattern.lengths
    last = len(pattern.rank_of) - 1
    for stage in range(last):
        assert forwards[stage + 1] >= forwards[stage] + lengths.F[stage]
        assert inputs[stage] >= inputs[stage + 1] + lengths.I[stage + 1]
    assert inputs[last] >= forwards[last] + lengths.F[last]
    assert all(weights[stage] >= inputs[stage] + lengths.I[stage] for stage in range(last + 1))


@UNHURRIED
@given(patterns(), st.integers(1, 6))
def test_orders_of_a_pattern_are_legal_schedules(pattern: BuildingBlock, microbatches: int) -> None:
    rows = tuple(map(tuple, pattern.orders(microbatches)))
    check(Schedule("pattern", microbatches, pattern.rank_of, rows))


@UNHURRIED
@given(patterns(), st.data())
def test_the_peak_of_a_pattern_is_that_of_its_steady_state(
    pattern: BuildingBlock, data: st.DataObject
) -> None:
    stages = len(pattern.rank_of)
    amounts = st.lists(st.integers(0, 3), min_size=stages, max_size=stages)
    until_input, until_weight = data.draw(amounts), data.draw(amounts)
    assert pattern.peak(until_input, until_weight) == held_in_steady_state(pattern, until_input, until_weight)


def held_in_steady_state(pattern: BuildingBlock, until_input: list[int], until_weight: list[int]) -> int:
    """The most over the ranks and the cells of one period, cell by cell and micro-batch by micro-batch."""
    period, most = pattern.period, 0
    far = max(pattern.starts.W) + 3
    for rank in set(pattern.rank_of):
        for cell in range(period):
            held = 0
            for stage in (stage for stage, owner in enumerate(pattern.rank_of) if owner == rank):
                turned = pattern.starts.I[stage] + pattern.lengths.I[stage]
                end = pattern.starts.W[stage] + pattern.lengths.W[stage]
                for age in range(cell, far, period):
                    if pattern.starts.F[stage] <= age < turned:
                        held += until_input[stage]
                    elif turned <= age < end:
                        held += until_weight[stage]
            most = max(most, held)
    return most
