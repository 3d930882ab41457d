"""Peaks from counts of held micro-batches against the walk through all actions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.held_microbatches import HeldMicrobatches
from plait.schedules.memory import MemoryCosts, peak_memory
from plait.schedules.search.api import schedule

POLICIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 5), data=st.data())
def test_the_peaks_are_those_of_the_actions_in_order(policy, ranks, data) -> None:
    made = schedule(policy, ranks=ranks, microbatches=data.draw(st.integers(1, 8)))
    sizes = st.lists(st.integers(0, 50), min_size=made.stages, max_size=made.stages)
    first, second = tuple(data.draw(sizes)), tuple(data.draw(sizes))
    expected = peak_memory(made, MemoryCosts(Fraction(1), first, second))
    assert HeldMicrobatches(made).peak_memory(first, second) == tuple(map(int, expected))


def test_a_rank_of_1f1b_holds_one_micro_batch_for_each_rank_from_it_on() -> None:
    held = HeldMicrobatches(schedule("1f1b", ranks=3, microbatches=8))
    assert held.peaks == (((3, 0), (2, 1)), ((2, 0), (1, 1)), ((1, 0), (0, 1)))
