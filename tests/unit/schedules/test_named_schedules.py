"""The eight policies: small cases as literals, all small cases legal, and what each holds."""

from __future__ import annotations

from fractions import Fraction
from textwrap import dedent
from typing import Any

import pytest
from schedule_cases import timeline

from plait.errors import ScheduleError
from plait.schedules.check import check
from plait.schedules.costs import peak_memory
from plait.schedules.named_schedules import POLICIES, RankPosition, forward_only, policy_schedule
from plait.schedules.schedule import Placement
from plait.schedules.search.schedule_by_policy import schedule

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
    ("zb-h1", 1, 2): ["F0 I0 W0 F1 I1 W1"],
    ("zb-h1", 2, 1): ["F0 I0 W0", "F0 I0 W0"],
    ("zb-h1", 2, 4): [
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
    ],
    ("zb-h1", 3, 5): [
        "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4",
    ],
    ("zb-h1", 4, 6): [
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5",
        "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5",
        "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5",
    ],
    ("zb-h2", 1, 2): ["F0 I0 W0 F1 I1 W1"],
    ("zb-h2", 2, 4): [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
    ("zb-h2", 3, 2): [
        "F0 F1 I0 W0 I1 W1",
        "F0 F1 I0 I1 W0 W1",
        "F0 I0 F1 I1 W0 W1",
    ],
    ("zb-h2", 3, 6): [
        "F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5",
        "F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5",
    ],
    ("zb-h2", 4, 8): [
        "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7",
        "F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7",
        "F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7",
    ],
}


@pytest.mark.parametrize(("policy", "ranks", "microbatches"), TIMELINES)
def test_policies_of_one_stage_a_rank_have_the_timelines_written_by_hand(
    policy: str, ranks: int, microbatches: int
) -> None:
    made = policy_schedule(policy, ranks, microbatches)
    assert timeline(made) == TIMELINES[policy, ranks, microbatches]
    assert (made.policy, made.microbatches, made.rank_of) == (policy, microbatches, tuple(range(ranks)))


GRIDS = {
    ("interleaved", 1, 2): """
        rank 0  0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1
    """,
    ("interleaved", 2, 4): """
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .
    """,
    ("interleaved", 2, 1): """
        rank 0  0F0  .  2F0  .   .  2B0  .  0B0
        rank 1   .  1F0  .  3F0 3B0  .  1B0  .
    """,
    ("interleaved", 2, 3): """
        rank 0  0F0 0F1 0F2 2F0 2F1 2F2 2B0  .  2B1  .  2B2 0B0 0B1 0B2
        rank 1   .  1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2  .
    """,
    ("interleaved", 2, 5): """
        rank 0  0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1  .  0B2  .  2B3 2B4 0B3 0B4
        rank 1   .  1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4  .
    """,
    ("interleaved", 3, 1): """
        rank 0  0F0  .   .  3F0  .   .   .   .  3B0  .   .  0B0
        rank 1   .  1F0  .   .  4F0  .   .  4B0  .   .  1B0  .
        rank 2   .   .  2F0  .   .  5F0 5B0  .   .  2B0  .   .
    """,
    ("interleaved", 3, 3): """
        rank 0  0F0 0F1 0F2 3F0 3F1 3F2  .   .  3B0  .  3B1  .  3B2 0B0 0B1 0B2
        rank 1   .  1F0 1F1 1F2 4F0 4F1 4F2 4B0  .  4B1  .  4B2 1B0 1B1 1B2  .
        rank 2   .   .  2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2  .   .
    """,
    ("interleaved", 4, 3): """
        rank 0  0F0 0F1 0F2  .  4F0 4F1 4F2  .   .   .   .  4B0  .  4B1  .  4B2 0B0 0B1  .  0B2
        rank 1   .  1F0 1F1 1F2  .  5F0 5F1 5F2  .   .  5B0  .  5B1  .  5B2 1B0 1B1  .  1B2  .
        rank 2   .   .  2F0 2F1 2F2  .  6F0 6F1 6F2 6B0  .  6B1  .  6B2 2B0 2B1  .  2B2  .   .
        rank 3   .   .   .  3F0 3F1 3F2  .  7F0 7B0 7F1 7B1 7F2 7B2 3B0 3B1  .  3B2  .   .   .
    """,
    ("zb-v", 1, 2): """
        rank 0  0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1
    """,
    ("zb-v", 2, 3): """
        rank 0  0F0 0F1  .  3F0 3I0 3W0 0F2 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0W1 0I2 0W2
        rank 1   .  1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2W1 1W1 2I2 1I2 2W2 1W2
    """,
    ("zb-v", 3, 3): """
        rank 0  0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 0I0 5W2 0W0 0I1 0W1  .  0I2 0W2
        rank 1   .  1F0 1F1  .  4F0 1F2 4F1 4I0 4W0 4F2 4I1 1I0 4W1 1W0 4I2 1I1 4W2 1W1 1I2 1W2  .
        rank 2   .   .  2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3W0 2W0 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .
    """,
    ("v-half", 2, 3): """
        rank 0  0F0  .   .  3F0 3I0 0F1 3W0  .  3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0W1 0I2 0W2
        rank 1   .  1F0 2F0  .   .  2I0 1F1 2F1 1I0 2W0 1W0 2I1 1F2 2F2 1I1 2W1 1W1 2I2 1I2 2W2 1W2
    """,
    ("v-half", 3, 3): """
        rank 0  0F0 0F1  .   .   .  5F0 5I0 5W0 0F2  .  5F1 5I1 5W1 0I0 0W0 5F2 5I2 5W2 0I1 0W1  .  0I2 0W2
        rank 1   .  1F0  .   .  4F0 1F1  .  4I0 4W0 4F1 1F2 1I0 4I1 4W1 4F2 1W0 1I1 4I2 4W2 1W1 1I2 1W2  .
        rank 2   .   .  2F0 3F0  .   .  2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .
    """,
    ("v-min", 2, 3): """
        rank 0  0F0  .   .  3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2  .  0I2 0W2
        rank 1   .  1F0 2F0  .   .  2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """,
    ("v-min", 3, 2): """
        rank 0  0F0  .   .   .   .  5F0 0F1 5I0 5W0  .   .  5F1  .  0I0 5I1 5W1 0W0  .   .  0I1 0W1
        rank 1   .  1F0  .   .  4F0  .   .  1F1 4I0  .  4F1 4W0 1I0 1W0  .  4I1 4W1  .  1I1 1W1  .
        rank 2   .   .  2F0 3F0  .   .   .   .  2F1 3F1 3I0 2I0 3W0 2W0  .   .  3I1 2I1 3W1 2W1  .
    """,
}


@pytest.mark.parametrize(("policy", "ranks", "microbatches"), GRIDS)
def test_policies_of_two_chunks_a_rank_have_the_grids_written_by_hand(
    policy: str, ranks: int, microbatches: int
) -> None:
    made = policy_schedule(policy, ranks, microbatches)
    assert str(made) == dedent(GRIDS[policy, ranks, microbatches]).strip("\n")
    assert made.rank_of == POLICIES[policy].placement.rank_of(ranks, 2)


def test_interleaved_with_three_chunks_has_the_order_written_by_hand() -> None:
    made = policy_schedule("interleaved", 2, 2, 3)
    assert made.rank_of == (0, 1, 0, 1, 0, 1)
    assert [" ".join(row) for row in made.order] == [
        "0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1",
    ]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sizes"),
    [
        (2, 4, [2, 2]),
        (2, 7, [3, 2, 2]),
        (3, 7, [4, 3]),
        (4, 7, [7]),
        (4, 3, [3]),
        (3, 11, [4, 4, 3]),
        (1, 3, [1] * 3),
    ],
)
def test_microbatches_go_through_chunks_in_groups(ranks: int, microbatches: int, sizes: list[int]) -> None:
    groups = RankPosition(0, ranks, microbatches, 2).groups
    assert [len(group) for group in groups] == sizes
    assert [number for group in groups for number in group] == list(range(microbatches))


@pytest.mark.parametrize(("most_ranks", "most"), [(4, 7), pytest.param(6, 13, marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_legal(policy: str, most_ranks: int, most: int) -> None:
    for ranks in range(1, most_ranks + 1):
        for microbatches in range(1, most + 1):
            check(policy_schedule(policy, ranks, microbatches))


@pytest.mark.parametrize(("most_ranks", "most"), [(3, 5), pytest.param(5, 11, marks=pytest.mark.full)])
@pytest.mark.parametrize("chunks", [1, 3, 4, 5])
def test_interleaved_is_legal_with_any_number_of_chunks(chunks: int, most_ranks: int, most: int) -> None:
    for ranks in range(1, most_ranks + 1):
        for microbatches in range(1, most + 1):
            check(policy_schedule("interleaved", ranks, microbatches, chunks))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 5), (3, 2), (4, 8), (5, 7), (8, 24)])
def test_each_rank_of_gpipe_1f1b_and_zero_bubble_holds_the_micro_batches_of_the_formula(
    ranks: int, microbatches: int
) -> None:
    def peak(policy: str) -> tuple[Fraction, ...]:
        return peak_memory(policy_schedule(policy, ranks, microbatches))

    assert peak("gpipe") == (microbatches,) * ranks
    assert peak("1f1b") == tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    assert peak("zb-h1") == (min(microbatches, ranks),) * ranks
    assert peak("zb-h2") == (min(microbatches, 2 * ranks - 1),) * ranks


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 3), (2, 1), (2, 4), (4, 2), (5, 3)])
def test_each_rank_of_interleaved_holds_the_micro_batches_of_the_formula(
    ranks: int, rounds: int, chunks: int
) -> None:
    ahead = [2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
    held = tuple(Fraction(min(count, chunks * ranks * rounds), chunks) for count in ahead)
    assert peak_memory(policy_schedule("interleaved", ranks, ranks * rounds, chunks)) == held


HELD_IN_A_V = {
    "zb-v": [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "v-half": [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7],
    "v-min": [2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5],
}
"""For 2 to 12 ranks: all, a half and one, a third and one, in micro-batches of a rank."""


@pytest.mark.parametrize("most", [7, pytest.param(12, marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", HELD_IN_A_V)
def test_ranks_of_v_policies_hold_the_published_memory(policy: str, most: int) -> None:
    for ranks, held in enumerate(HELD_IN_A_V[policy][: most - 1], start=2):
        assert max(peak_memory(policy_schedule(policy, ranks, 3 * ranks))) == held
        assert max(peak_memory(schedule(policy, ranks=ranks, microbatches=2 * ranks, limit=held))) == held


def test_each_policy_has_its_listed_placement() -> None:
    placements = {name: policy.placement for name, policy in POLICIES.items()}
    assert placements == {
        "gpipe": Placement.LINEAR,
        "1f1b": Placement.LINEAR,
        "interleaved": Placement.LOOP,
        "zb-h1": Placement.LINEAR,
        "zb-h2": Placement.LINEAR,
        "zb-v": Placement.V,
        "v-half": Placement.V,
        "v-min": Placement.V,
    }


def test_forward_only_runs_all_stages_of_each_micro_batch_in_order() -> None:
    made = forward_only((0, 1, 1, 0), ranks=2, microbatches=2)
    assert made.order == (("0F0", "3F0", "0F1", "3F1"), ("1F0", "2F0", "1F1", "2F1"))
    assert not made.trains
    check(made)


@pytest.mark.parametrize(
    ("policy", "hint"),
    [("1f1", "did you mean 1f1b?"), ("zbv", "did you mean zb-v?"), ("zebra", "choose one of gpipe, 1f1b")],
)
def test_policy_schedule_refuses_an_unknown_policy(policy: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule(policy, ranks=2, microbatches=2)
    assert str(caught.value).startswith(f"there is no schedule policy {policy!r}: {hint}")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, 2.0, "2", True])
@pytest.mark.parametrize("name", ["ranks", "microbatches", "chunks"])
@pytest.mark.parametrize("policy", ["gpipe", "interleaved", "v-min"])
def test_refuses_counts_that_are_no_whole_number_of_at_least_one(policy: str, name: str, wrong: Any) -> None:
    counts: dict[str, Any] = {"ranks": 2, "microbatches": 2, name: wrong}
    with pytest.raises(ScheduleError) as caught:
        policy_schedule(policy, **counts)
    assert str(caught.value) == f"{name} is {wrong!r}: give a whole number from 1 to 1,000,000."


@pytest.mark.parametrize("counts", [{"ranks": 0, "microbatches": 1}, {"ranks": 1, "microbatches": 0}])
def test_forwards_alone_need_counts_too(counts: dict[str, int]) -> None:
    name = min(counts, key=lambda key: counts[key])
    with pytest.raises(ScheduleError, match=f"{name} is 0: give a whole number from 1"):
        forward_only((0,), **counts)


@pytest.mark.parametrize(
    ("policy", "chunks", "has"),
    [
        ("gpipe", 2, 1),
        ("1f1b", 3, 1),
        ("zb-h1", 2, 1),
        ("zb-h2", 2, 1),
        ("zb-v", 1, 2),
        ("v-half", 3, 2),
        ("v-min", 4, 2),
    ],
)
def test_refuses_chunks_that_a_policy_cannot_have(policy: str, chunks: int, has: int) -> None:
    assert policy_schedule(policy, 2, 2, has) == policy_schedule(policy, 2, 2)
    with pytest.raises(ScheduleError) as caught:
        policy_schedule(policy, 2, 2, chunks)
    assert str(caught.value) == f"chunks is {chunks}, but {policy} takes {has} only: set it to that."
