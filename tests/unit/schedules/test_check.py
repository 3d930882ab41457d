"""The table of rules: each broken in a small schedule, and what the refusal says and shows."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan
from textwrap import dedent

import pytest
from schedule_cases import with_row, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.check import RULES, check
from plait.schedules.costs import MemoryCosts
from plait.schedules.named_schedules import policy_schedule

PLACE, ONCE, ORDER, PROGRESS, MICROBATCHES = RULES

BROKEN = {
    "a stage of another rank": (
        ["0F0 1B0 0B0", "1F0"],
        (0, 1),
        1,
        f"""\
        rule '{PLACE}' is broken on rank 0 by 1B0: its stage is not on this rank.

        rank 0   0F0  [1B0]  0B0
        rank 1    .    1F0    .
        """,
    ),
    "a stage of no rank": (
        ["0F0 0B0 7F0"],
        (0,),
        1,
        f"""\
        rule '{PLACE}' is broken on rank 0 by 7F0: its stage is not on this rank.

        rank 0   0F0   0B0  [7F0]
        """,
    ),
    "twice": (
        ["0F0 0F0 0B0"],
        (0,),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0F0: it appears twice.

        rank 0  [0F0] [0F0]  0B0
        """,
    ),
    "no forward": (
        ["0F0 0B0", "1B0"],
        (0, 1),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 1 by 1F0: it is missing.

        rank 0  0F0 0B0
        rank 1  1B0  .
        """,
    ),
    "a rank without anything": (
        ["0F0 0B0", ""],
        (0, 1),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 1 by 1F0: it is missing.

        rank 0  0F0 0B0
        rank 1   .   .
        """,
    ),
    "no weight gradient": (
        ["0F0 0I0"],
        (0,),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0W0: it is missing.

        rank 0  0F0 0I0
        """,
    ),
    "no input gradient": (
        ["0F0 0W0"],
        (0,),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0I0: it is missing.

        rank 0  0F0 0W0
        """,
    ),
    "no backward": (
        ["0F0 0F1 0B0"],
        (0,),
        2,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0I1: it is missing.

        rank 0  0F0 0F1 0B0
        """,
    ),
    "two weight gradients": (
        ["0F0 0B0 0W0"],
        (0,),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0W0: B, which includes it, appears as well.

        rank 0   0F0   0B0  [0W0]
        """,
    ),
    "two input gradients": (
        ["0F0 0I0 0B0"],
        (0,),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0I0: B, which includes it, appears as well.

        rank 0   0F0  [0I0]  0B0
        """,
    ),
    "a micro-batch too many": (
        ["0F0 0B0 0F1 0B1"],
        (0,),
        1,
        f"""\
        rule '{ONCE}' is broken on rank 0 by 0F1: there is no such micro-batch.

        rank 0   0F0   0B0  [0F1]  0B1
        """,
    ),
    "backward before forward": (
        ["0B0 0F0"],
        (0,),
        1,
        f"""\
        rule '{ORDER}' is broken on rank 0 by 0B0: F of its stage and micro-batch must come first.

        rank 0  [0B0]  0F0
        """,
    ),
    "weight before input gradient": (
        ["0F0 0I0 0W0", "1F0 1W0 1I0"],
        (0, 1),
        1,
        f"""\
        rule '{ORDER}' is broken on rank 1 by 1W0: I of its stage and micro-batch must come first.

        rank 0   0F0   0I0   0W0    .
        rank 1    .    1F0  [1W0]  1I0
        """,
    ),
    "a stage before the one before": (
        ["1F0 0F0 1B0 0B0"],
        (0, 0),
        1,
        f"""\
        rule '{PROGRESS}' is broken on rank 0 by 1F0: it waits for 0F0 of rank 0, which never runs.

        rank 0  [1F0]  0F0   1B0   0B0
        """,
    ),
    "ranks that wait for each other": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        (0, 1),
        2,
        f"""\
        rule '{PROGRESS}' is broken on rank 0 by 0B0: it waits for 1I0 of rank 1, which never runs.

        rank 0   0F0  [0B0]  0F1   0B1    .
        rank 1    .    1F0   1F1   1B0   1B1
        """,
    ),
    "input gradients out of order": (
        ["0F0 0F1 0B1 0B0"],
        (0,),
        2,
        f"""\
        rule '{MICROBATCHES}' is broken on rank 0 by 0B1: I of micro-batch 0 is due (same sums, any schedule).

        rank 0   0F0   0F1  [0B1]  0B0
        """,
    ),
    "weight gradients out of order": (
        ["0F0 0F1 0I0 0I1 0W1 0W0"],
        (0,),
        2,
        f"""\
        rule '{MICROBATCHES}' is broken on rank 0 by 0W1: W of micro-batch 0 is due (same sums, any schedule).

        rank 0   0F0   0F1   0I0   0I1  [0W1]  0W0
        """,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_names_itself_the_rank_and_the_action_and_shows_where(case: str) -> None:
    rows, rank_of, microbatches, told = BROKEN[case]
    with pytest.raises(ScheduleError) as caught:
        check(written(rows, rank_of, microbatches))
    assert str(caught.value) == dedent(told).rstrip()


def test_the_first_rule_that_is_broken_is_named() -> None:
    # Out of place, doubled, and its backward comes first: a later rule makes no sense where an earlier fails.
    with pytest.raises(ScheduleError, match=f"rule '{PLACE}'"):
        check(written(["0B0 0F0 0F0 1F0", ""], rank_of=(0, 1), microbatches=1))


@pytest.mark.parametrize(
    ("stray", "rule"),
    [
        (Action(-1, Kind.F, 0), PLACE),
        (Action(10**9, Kind.F, 0), PLACE),
        (Action(0, Kind.F, -1), ONCE),
        (Action(0, Kind.F, 10**9), ONCE),
    ],
    ids=str,
)
def test_actions_of_unknown_stages_or_micro_batches_are_refused(stray: Action, rule: str) -> None:
    made = written(["0F0 0B0"], rank_of=(0,), microbatches=1)
    with pytest.raises(ScheduleError, match=f"rule '{rule}' is broken on rank 0 by {stray}: "):
        check(with_row(made, 0, [*made.actions[0], stray]))


def test_a_long_schedule_is_shown_around_the_cell() -> None:
    row = " ".join(f"0F{microbatch} 0B{microbatch}" for microbatch in range(10)).split()
    row[10:12] = row[11], row[10]
    with pytest.raises(ScheduleError) as caught:
        check(written([" ".join(row)], rank_of=(0,), microbatches=10))
    assert str(caught.value).splitlines()[-1] == (
        "rank 0  …  0F2   0B2   0F3   0B3   0F4   0B4  [0B5]  0F5   0F6   0B6   0F7   0B7   0F8  …"
    )


def test_forwards_may_stand_in_any_order() -> None:
    check(written(["0F1 0F0 0B0 0B1"], rank_of=(0,), microbatches=2))


def test_messages_may_be_taken_in_another_order_than_they_are_sent() -> None:
    # Rank 1 sends 2I1 before 0I0, and rank 0 takes 0I0 before 2I1.
    rows = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]
    check(written(rows, rank_of=(0, 1, 0, 1), microbatches=2))


def test_some_backwards_may_be_split_and_others_not() -> None:
    check(written(["0F0 0I0 0W0", "1F0 1B0"], rank_of=(0, 1), microbatches=1))
    check(written(["0F0 0F1 0F2 0B0 0I1 0W1 0B2"], rank_of=(0,), microbatches=3))
    with pytest.raises(ScheduleError, match="by 0B1: W of micro-batch 0 is due"):
        check(written(["0F0 0F1 0I0 0B1 0W0"], rank_of=(0,), microbatches=2))


def test_a_schedule_beyond_the_memory_limit_is_refused_showing_the_action() -> None:
    made = policy_schedule("1f1b", 3, 4)
    check(made, limit=3)
    check(made, limit=2.9999999999)  # as good as 3
    with pytest.raises(ScheduleError) as caught:
        check(made, limit=2.9)
    assert str(caught.value) == dedent("""\
        rule 'memory limit' is broken on rank 0 by 0F2: with it the rank holds 3, above the limit of 2.9.

        rank 0   0F0   0F1  [0F2]   .     .    0B0   0F3   0B1    .   …
        rank 1    .    1F0   1F1    .    1B0   1F2   1B1   1F3   1B2  …
        rank 2    .     .    2F0   2B0   2F1   2B1   2F2   2B2   2F3  …""")


def test_a_limit_counts_chunks_as_their_part() -> None:
    made = policy_schedule("interleaved", 2, 2)
    check(made, limit=2)
    with pytest.raises(ScheduleError, match=r"by 2F1: with it the rank holds 2, above the limit of 1\.5"):
        check(made, limit=1.5)


def test_a_limit_takes_what_is_held_before_and_after_the_input_gradient() -> None:
    made = written(["0F0 0I0 0F1 0I1 0W0 0W1"], rank_of=(0,), microbatches=2)
    check(made, limit=1, memory_costs=MemoryCosts(Fraction(1), (1,), (0,)))
    with pytest.raises(ScheduleError, match=r"by 0F1: with it the rank holds 1\.5, above the limit of 1\.25"):
        check(made, limit=1.25, memory_costs=MemoryCosts(Fraction(1, 2), (2,), (1,)))
    with pytest.raises(ScheduleError, match="by 0I0: with it the rank holds 3, above the limit of 2"):
        check(made, limit=2, memory_costs=MemoryCosts(Fraction(1), (1,), (3,)))


def test_a_broken_order_is_named_before_a_broken_memory_limit() -> None:
    with pytest.raises(ScheduleError, match=f"rule '{ORDER}'"):
        check(written(["0B0 0F0"], rank_of=(0,), microbatches=1), limit=0)


def test_a_limit_may_be_infinite_but_is_a_number() -> None:
    made = policy_schedule("gpipe", 2, 8)
    check(made, limit=inf)
    for wrong in (nan, -1, -inf):
        with pytest.raises(ScheduleError, match=f"^limit is {wrong}: give the most that a rank may hold"):
            check(made, limit=wrong)
