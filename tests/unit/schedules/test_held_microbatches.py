"""What ranks hold when their actions start, against the walk through all actions."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from plait.schedules.action import Kind
from plait.schedules.costs import MemoryCosts, peak_memory
from plait.schedules.held_microbatches import ActionStart, HeldMicrobatches
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import AwaitReceive, LoweringSpec, PostReceive, ReleaseBuffers
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule_by_policy import schedule

POLICIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 5), data=st.data())
def test_the_peaks_are_those_of_the_actions_in_order(policy, ranks, data) -> None:
    """Peaks from counts of held micro-batches equal `peak_memory`, which goes through the actions."""
    made = schedule(policy, ranks=ranks, microbatches=data.draw(st.integers(1, 8)))
    sizes = st.lists(st.integers(0, 50), min_size=made.stages, max_size=made.stages)
    first, second = tuple(data.draw(sizes)), tuple(data.draw(sizes))
    expected = peak_memory(made, MemoryCosts(Fraction(1), first, second))
    assert [_peak(one, first, second) for one in HeldMicrobatches(made).ranks] == [*map(int, expected)]


def _peak(rank, first, second) -> int:
    """Return the peak where an input gradient allocates what is kept after it, and then frees the rest."""
    sizes = [costs[stage] for costs in (first, second) for stage in rank.stages]
    added = [max(0, second[stage] - first[stage]) for stage in rank.stages]
    return max(
        sum(count * size for count, size in zip(held, sizes, strict=True))
        + (added[start.place] if start.kind in (Kind.I, Kind.B) else 0)
        for start, most in rank.starts.items()
        for held in most
    )


def test_a_rank_of_1f1b_holds_one_micro_batch_for_each_rank_from_it_on() -> None:
    held = HeldMicrobatches(schedule("1f1b", ranks=3, microbatches=8))
    for rank, one in enumerate(held.ranks):
        most = {ActionStart(0, kind, True): ((3 - rank, 0),) for kind in (Kind.F, Kind.B)}
        assert one.starts == most  # before the first backward it holds no more
    assert [one.sending for one in held.ranks] == [0, 2, 2]


def test_few_micro_batches_are_held_before_the_first_backward_only() -> None:
    (first, _) = HeldMicrobatches(schedule("gpipe", ranks=2, microbatches=3)).ranks
    assert first.starts == {
        ActionStart(0, Kind.F, False): ((3, 0),),
        ActionStart(0, Kind.B, False): ((3, 0),),
        ActionStart(0, Kind.B, True): ((2, 0),),
    }


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 5), microbatches=st.integers(1, 8))
def test_receive_buffers_are_those_of_the_program(policy, ranks, microbatches) -> None:
    made = schedule(policy, ranks=ranks, microbatches=microbatches)
    for rank, held in enumerate(HeldMicrobatches(made).ranks):
        in_use, buffers = _walked(made, rank)
        assert held.received == in_use <= held.receive_buffers
        if made.stages == made.ranks:  # with several stages on each, messages may come in another order
            assert held.receive_buffers == buffers


def _walked(made: Schedule, rank: int) -> tuple[int, int]:
    """Return how many received tensors are in use at most, and how many buffers with those posted."""
    lent, posted, most, buffers = Counter[tuple[int, int]](), 0, 0, 0
    for one in lower(made, LoweringSpec((1,) * made.stages, {}))[rank]:
        if isinstance(one, PostReceive):
            posted += 1
        elif isinstance(one, AwaitReceive):
            posted -= 1
            lent[one.action.stage, one.action.microbatch] += 1
        elif isinstance(one, ReleaseBuffers):
            lent.pop((one.action.stage, one.action.microbatch), None)
        most, buffers = max(most, lent.total()), max(buffers, lent.total() + posted)
    return most, buffers


@given(policy=st.sampled_from(POLICIES), ranks=st.integers(1, 5), microbatches=st.integers(1, 8))
def test_the_largest_ranks_cover_all_others(policy, ranks, microbatches) -> None:
    held = HeldMicrobatches(schedule(policy, ranks=ranks, microbatches=microbatches))
    largest = held.largest([None] * ranks)
    assert all(any(one.covers(other) for one in largest) for other in held.ranks)
    assert not any(one.covers(other) for one in largest for other in largest if one is not other)
