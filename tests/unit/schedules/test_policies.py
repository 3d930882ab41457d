from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, timeline

from plait.errors import ScheduleError
from plait.schedules.action import Kind
from plait.schedules.check import check
from plait.schedules.policies import POLICIES, forward_only, schedule

TIMELINES = {
    ("gpipe", 1, 3): ["F0 F1 F2 B0 B1 B2"],
    ("gpipe", 2, 1): ["F0 B0", "F0 B0"],
    ("gpipe", 2, 4): [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 F3 B0 B1 B2 B3",
    ],
    ("1f1b", 1, 3): ["F0 B0 F1 B1 F2 B2"],
    ("1f1b", 2, 4): [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
    ("1f1b", 4, 4): [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
    ("1f1b", 4, 2): [  # fewer micro-batches than ranks
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ],
    ("1f1b", 3, 5): [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ],
}


@pytest.mark.parametrize(("policy", "ranks", "microbatches"), TIMELINES)
def test_timeline(policy: str, ranks: int, microbatches: int) -> None:
    made = schedule(policy, ranks=ranks, microbatches=microbatches)
    assert timeline(made) == TIMELINES[policy, ranks, microbatches]
    assert (made.policy, made.microbatches, made.rank_of) == (policy, microbatches, tuple(range(ranks)))


@UNHURRIED
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 9), st.integers(1, 12))
def test_every_policy_is_legal(policy: str, ranks: int, microbatches: int) -> None:
    check(schedule(policy, ranks=ranks, microbatches=microbatches))


@UNHURRIED
@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_holds_as_many_microbatches_as_stages_from_here_to_the_end(
    ranks: int, microbatches: int
) -> None:
    made = schedule("1f1b", ranks=ranks, microbatches=microbatches)
    for rank, actions in enumerate(made.actions):
        held = most = 0
        for action in actions:
            held += 1 if action.kind is Kind.F else -1
            most = max(most, held)
        assert most == min(ranks - rank, microbatches)


def test_forward_only() -> None:
    made = forward_only((0, 1, 1, 0), ranks=2, microbatches=2)
    assert made.order == (("0F0", "3F0", "0F1", "3F1"), ("1F0", "2F0", "1F1", "2F1"))
    assert not made.trains
    check(made)


@pytest.mark.parametrize(
    ("policy", "hint"), [("1f1", "did you mean 1f1b?"), ("zebra", "choose one of gpipe, 1f1b")]
)
def test_refuses_an_unknown_policy(policy: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule(policy, ranks=2, microbatches=2)
    assert str(caught.value).startswith(f"there is no schedule policy {policy!r}: {hint}")


@pytest.mark.parametrize("counts", [{"ranks": 0, "microbatches": 1}, {"ranks": 1, "microbatches": 0}])
def test_refuses_counts_below_one(counts: dict[str, int]) -> None:
    name = min(counts, key=lambda key: counts[key])
    with pytest.raises(ScheduleError, match=f"{name} is 0: a schedule needs at least 1"):
        schedule("gpipe", **counts)
    with pytest.raises(ScheduleError, match=f"{name} is 0"):
        forward_only((0,), **counts)
