"""Ranks that share processors, against the simulation of ranks that do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.action import Kind
from plait.schedules.event_simulation import Timing, simulate_shared
from plait.schedules.schedule import Schedule
from plait.schedules.search.api import schedule

POLICIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@st.composite
def problems(draw: Any) -> tuple[Schedule, Timing]:
    made = schedule(
        draw(st.sampled_from(POLICIES)), ranks=draw(st.integers(1, 4)), microbatches=draw(st.integers(1, 6))
    )
    times = st.lists(st.integers(0, 20), min_size=made.stages, max_size=made.stages)
    first, second, third = draw(times), draw(times), draw(times)
    whole = [one + other for one, other in zip(second, third, strict=True)]
    hops = draw(times)
    durations = {Kind.F: first, Kind.I: second, Kind.W: third, Kind.B: whole}
    return made, Timing(durations, [0, *hops[1:]], [*hops[1:], 0])


@given(problem=problems())
def test_without_a_speedup_actions_take_their_durations(problem: tuple[Schedule, Timing]) -> None:
    made, timing = problem
    found = simulate_shared(made.event_order, timing, 1.0)
    assert [ends[-1] for ends in found.ends] == made.event_order.last_ends(timing)


@given(problem=problems(), speedup=st.floats(1.0, 4.0))
def test_no_rank_is_faster_than_the_speedup_and_no_work_is_lost(
    problem: tuple[Schedule, Timing], speedup: float
) -> None:
    made, timing = problem
    alike = simulate_shared(made.event_order, timing, 1.0)
    found = simulate_shared(made.event_order, timing, speedup)
    whole = sum(alike.busy(rank) for rank in range(made.ranks))
    assert max(map(max, found.ends)) >= whole / made.ranks - 1e-6
    for ends, slowest in zip(found.ends, alike.ends, strict=True):
        assert slowest[-1] / speedup - 1e-6 <= ends[-1]


def test_two_ranks_that_take_turns_are_as_fast_as_one_rank_alone() -> None:
    made = schedule("1f1b", ranks=2, microbatches=1)
    four = [4, 4]
    timing = Timing({Kind.F: four, Kind.I: four, Kind.W: four, Kind.B: [8, 8]}, [0, 0], [0, 0])
    found = simulate_shared(made.event_order, timing, 3.0)
    assert found.starts == [[0, 8], [2, 4]]
    assert found.ends == [[2, 12], [4, 8]]


def test_three_of_four_ranks_share_what_the_fourth_leaves() -> None:
    made = schedule("gpipe", ranks=4, microbatches=3)
    ones = [12] * 4
    timing = Timing({Kind.F: ones, Kind.I: ones, Kind.W: ones, Kind.B: [24] * 4}, [0] * 4, [0] * 4)
    found = simulate_shared(made.event_order, timing, 2.0)
    assert found.ends[0][:3] == pytest.approx([6, 12, 21])  # one, two and three ranks at a time
