"""Damage to legal schedules is found, under the right rule; and nothing is refused that breaks none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, permutations, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_cases import (
    BRIEF,
    UNHURRIED,
    done_by_tokens,
    held_by_intervals,
    legal_schedules,
    with_row,
    written,
)

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.check import RULES, check
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

PLACE, ONCE, ORDER, PROGRESS, MICROBATCHES = RULES
LIMIT = "memory limit"


@UNHURRIED
@given(legal_schedules())
def test_legal_schedules_pass_the_check(made: Schedule) -> None:
    check(made)


DAMAGE = {
    "drop": {ONCE},
    "double": {ONCE},
    "to another rank": {PLACE},
    "another micro-batch": {ONCE},
    "another kind": {ONCE},
    "another stage": {PLACE, ONCE},
    "forward behind its backward": {ORDER},
    "micro-batches exchanged": {ORDER, PROGRESS, MICROBATCHES},
}
"""What is done to a legal schedule, and which rules that may break."""


@st.composite
def damaged(draw: st.DrawFn, damage: str) -> Schedule:
    """A legal schedule with one thing done to it."""
    made = draw(legal_schedules())
    rank = draw(st.integers(0, made.ranks - 1))
    row = list(made.actions[rank])
    position = draw(st.integers(0, len(row) - 1))
    action = row[position]
    if damage == "drop":
        del row[position]
    elif damage == "double":
        row.insert(draw(st.integers(0, len(row))), action)
    elif damage == "to another rank":
        assume(made.ranks > 1)
        other = draw(st.integers(0, made.ranks - 1).filter(lambda other: other != rank))
        there = list(made.actions[other])
        there.insert(draw(st.integers(0, len(there))), row.pop(position))
        made = with_row(made, other, there)
    elif damage == "another micro-batch":
        numbers = st.integers(0, made.microbatches + 1).filter(lambda number: number != action.microbatch)
        row[position] = action._replace(microbatch=draw(numbers))
    elif damage == "another kind":
        row[position] = action._replace(kind=draw(st.sampled_from([k for k in Kind if k is not action.kind])))
    elif damage == "another stage":
        numbers = st.integers(0, made.stages + 1).filter(lambda stage: stage != action.stage)
        row[position] = action._replace(stage=draw(numbers))
    elif damage == "forward behind its backward":
        forward = Action(action.stage, Kind.F, action.microbatch)
        row.remove(forward)
        ends = [i for i, other in enumerate(row) if other[::2] == forward[::2]]
        row.insert(draw(st.integers(ends[0] + 1, len(row))), forward)
    elif damage == "micro-batches exchanged":
        alike = [
            (one, other)
            for one, other in combinations(range(len(row)), 2)
            if row[one][:2] == row[other][:2] and row[one].kind is not Kind.F
        ]
        assume(alike)
        one, other = draw(st.sampled_from(alike))
        row[one], row[other] = row[other], row[one]
    spoiled = with_row(made, rank, row)
    assume(spoiled.trains)  # without its only backward a schedule is a legal one for evaluation
    return spoiled


@pytest.mark.parametrize("damage", DAMAGE)
@BRIEF
@given(data=st.data())
def test_a_damaged_schedule_is_refused_naming_the_broken_rule(damage: str, data: st.DataObject) -> None:
    spoiled = data.draw(damaged(damage))
    assert rule_named_by_check(spoiled) in DAMAGE[damage]


@UNHURRIED
@given(st.integers(2, 5), st.integers(2, 8), st.booleans(), st.data())
def test_two_ranks_that_are_crossed_deadlock(
    ranks: int, microbatches: int, split: bool, data: st.DataObject
) -> None:
    """A rank keeps a forward until it has a gradient, for which the next rank first wants that forward."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    rows = [
        [Action(stage, kind, number) for kind in kinds for number in range(microbatches)]
        for stage in range(ranks)
    ]
    rank = data.draw(st.integers(0, ranks - 2))
    late = data.draw(st.integers(1, microbatches - 1))
    early = data.draw(st.integers(0, late - 1))
    here = rows[rank]
    here.remove(Action(rank, Kind.F, late))
    here.insert(here.index(Action(rank, kinds[1], early)) + 1, Action(rank, Kind.F, late))
    crossed = Schedule("crossed", microbatches, tuple(range(ranks)), tuple(map(tuple, rows)))
    with pytest.raises(
        ScheduleError, match=rf"rule '{PROGRESS}' .*: it waits for .* which never runs\.\n\nrank 0 "
    ):
        check(crossed)


def first_broken(made: Schedule) -> str | None:
    """The rule that a schedule breaks, found in other ways than `check` finds it."""
    if any(
        made.stages_of(rank).count(stage) == 0 for rank, row in enumerate(made.actions) for stage, *_ in row
    ):
        return PLACE
    turns: dict[tuple[int, int], str] = defaultdict(str)
    for stage, kind, microbatch in (action for row in made.actions for action in row):
        turns[stage, microbatch] += kind
    wanted = {"FIW", "FB"} if made.trains else {"F"}
    if {*turns} != {*product(range(made.stages), range(made.microbatches))}:
        return ONCE
    if not {"".join(sorted(kinds, key="FIWB".index)) for kinds in turns.values()} <= wanted:
        return ONCE
    if not {*turns.values()} <= wanted:
        return ORDER
    if done_by_tokens(made) != [len(row) for row in made.actions]:
        return PROGRESS
    for stage, kinds in product(range(made.stages), ("IB", "WB")):
        numbers = [
            number for row in made.actions for at, kind, number in row if at == stage and kind in kinds
        ]
        if numbers != sorted(numbers):
            return MICROBATCHES
    return None


def rule_named_by_check(made: Schedule) -> str | None:
    try:
        check(made)
    except ScheduleError as error:
        told = str(error)
    else:
        return None
    found = re.match(r"rule '(.+?)' is broken on rank \d+ by \d+[FIWB]\d+: .+\.\n\nrank 0 ", told)
    assert found, told
    return found[1]


def every_order(*rows: str) -> Iterator[tuple[str, ...]]:
    return product(*([" ".join(order) for order in permutations(row.split())] for row in rows))


def test_every_order_of_two_ranks_is_judged_rightly() -> None:
    verdicts = defaultdict(int)
    for rows in every_order("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"):
        made = written(rows, rank_of=(0, 1), microbatches=2)
        verdicts[first_broken(made)] += 1
        assert rule_named_by_check(made) == first_broken(made), rows
    # By hand: on 36 of 576 a forward comes first everywhere; 2 * 5 of those cross, 3 * 3 - 2 are in order.
    assert verdicts == {ORDER: 540, PROGRESS: 10, MICROBATCHES: 19, None: 7}


@pytest.mark.parametrize("last", ["1F0 1I0 1W0 1F1 1I1 1W1", "1F1 1F0 1I0 1I1 1W0 1W1", "1F0 1F1 1B0 1B1"])
def test_every_order_of_a_split_backward_is_judged_rightly(last: str) -> None:
    for first, _ in every_order("0F0 0F1 0I0 0I1 0W0 0W1", ""):
        made = written([first, last], rank_of=(0, 1), microbatches=2)
        assert rule_named_by_check(made) == first_broken(made), first


@UNHURRIED
@given(legal_schedules(), st.data())
def test_swaps_are_refused_exactly_when_they_break_a_rule(made: Schedule, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, made.ranks - 1))
        row = list(made.actions[rank])
        one, other = (data.draw(st.integers(0, len(row) - 1)) for _ in "12")
        row[one], row[other] = row[other], row[one]
        made = with_row(made, rank, row)
    assert rule_named_by_check(made) == first_broken(made)


@UNHURRIED
@given(legal_schedules(), st.integers(0, 20), st.sampled_from([-0.25, 0, 0.25]))
def test_the_first_action_beyond_the_limit_is_named(made: Schedule, chunks: int, off: float) -> None:
    limit = max((chunks + off) * made.ranks / made.stages, 0)
    beyond = [
        (rank, row[place])
        for rank, row in enumerate(made.actions)
        for place, held in enumerate(held_by_intervals(row))
        if held > chunks + off
    ]
    if not beyond:
        check(made, limit)
        return
    rank, action = beyond[0]
    with pytest.raises(ScheduleError, match=f"rule '{LIMIT}' is broken on rank {rank} by {action}: "):
        check(made, limit)


@pytest.mark.parametrize(
    ("frugal", "limit", "lavish", "action"),
    [("1f1b", 4, "gpipe", "0F4"), ("zb-h1", 4, "zb-h2", "0F4"), ("v-min", 2, "v-half", "0F3")],
)
def test_another_order_of_the_same_actions_may_exceed_the_limit(
    frugal: str, limit: float, lavish: str, action: str
) -> None:
    check(policy_schedule(frugal, 4, 9), limit)
    with pytest.raises(ScheduleError, match=f"rule '{LIMIT}' is broken on rank 0 by {action}: "):
        check(policy_schedule(lavish, 4, 9), limit)


def test_another_order_on_one_rank_may_exceed_the_limit() -> None:
    made = with_row(policy_schedule("1f1b", 4, 9), 0, policy_schedule("gpipe", 4, 9).actions[0])
    check(made)
    with pytest.raises(ScheduleError, match=f"rule '{LIMIT}' is broken on rank 0 by 0F4: "):
        check(made, limit=4)
