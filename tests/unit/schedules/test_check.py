from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, can_run, legal_schedules, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.check import RULES, check, check_programs
from plait.schedules.lower import Place, Shape, lower
from plait.schedules.policies import schedule
from plait.schedules.program import AwaitReceive, PostReceive, Send
from plait.schedules.schedule import Schedule

PLACE, ONCE, ORDER, MICROBATCHES, PROGRESS = RULES

BROKEN = [
    (["0F0 1B0 0B0", "1F0"], (0, 1), 1, f"rule '{PLACE}' is broken on rank 0 by 1B0"),
    (["0F0 0B0 7F0"], (0,), 1, f"rule '{PLACE}' is broken on rank 0 by 7F0"),
    (["0F0 0F0 0B0"], (0,), 1, f"rule '{ONCE}' is broken on rank 0 by 0F0: it stands there twice"),
    (["0F0 0B0", "1B0"], (0, 1), 1, f"rule '{ONCE}' is broken on rank 1 by 1F0: it is missing"),
    (["0F0 0I0"], (0,), 1, f"rule '{ONCE}' is broken on rank 0 by 0W0: give I and W, or one B"),
    (["0F0 0B0 0W0"], (0,), 1, f"rule '{ONCE}' is broken on rank 0 by 0W0: give I and W, or one B"),
    (["0F0 0F1 0B0"], (0,), 2, f"rule '{ONCE}' is broken on rank 0 by 0I1"),
    (["0F0 0B0 0F1 0B1"], (0,), 1, f"rule '{ONCE}' is broken on rank 0 by 0F1: there is no such micro-batch"),
    (["0B0 0F0"], (0,), 1, f"rule '{ORDER}' is broken on rank 0 by 0B0: F of its stage"),
    (["0F0 0W0 0I0"], (0,), 1, f"rule '{ORDER}' is broken on rank 0 by 0W0: I of its stage"),
    (
        ["0F0 0F1 0B1 0B0"],
        (0,),
        2,
        f"rule '{MICROBATCHES}' is broken on rank 0 by 0B1: I of micro-batch 0 is due",
    ),
    (["0F0 0F1 0I0 0I1 0W1 0W0"], (0,), 2, f"rule '{MICROBATCHES}' is broken on rank 0 by 0W1: W of micro"),
    (["1F0 0F0 1B0 0B0"], (0, 0), 1, f"rule '{PROGRESS}' is broken on rank 0 by 1F0: it waits for stage 0"),
    (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        (0, 1),
        2,
        f"rule '{PROGRESS}' is broken on rank 0 by 0B0: it waits for stage 1 for ever",
    ),
]


@pytest.mark.parametrize(("rows", "rank_of", "microbatches", "message"), BROKEN)
def test_each_rule_names_itself_the_rank_and_the_action(
    rows: list[str], rank_of: tuple[int, ...], microbatches: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(written(rows, rank_of, microbatches))


def test_forwards_may_stand_in_any_order() -> None:
    check(written(["0F1 0F0 0B0 0B1"], rank_of=(0,), microbatches=2))


@UNHURRIED
@given(legal_schedules())
def test_legal_schedules_pass(made: Schedule) -> None:
    check(made)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Schedule, set[str]]:
    """A legal schedule with one thing done to it, and the rules that may say so."""
    made = draw(legal_schedules())
    rows = [list(actions) for actions in made.actions]
    rank = draw(st.sampled_from([rank for rank, row in enumerate(rows) if row]))
    position = draw(st.integers(0, len(rows[rank]) - 1))
    action = rows[rank][position]
    damage = draw(st.sampled_from(["drop", "duplicate", "move", "other micro-batch"]))
    named = {ONCE}
    if damage == "drop":
        del rows[rank][position]
    elif damage == "duplicate":
        rows[rank].insert(draw(st.integers(0, len(rows[rank]))), action)
    elif damage == "move":
        assume(made.ranks > 1)
        other = draw(st.sampled_from([other for other in range(made.ranks) if other != rank]))
        rows[other].insert(draw(st.integers(0, len(rows[other]))), rows[rank].pop(position))
        named = {PLACE}
    else:
        number = draw(st.integers(0, made.microbatches + 1).filter(lambda n: n != action.microbatch))
        rows[rank][position] = replace(action, microbatch=number)
    spoiled = replace(made, actions=tuple(map(tuple, rows)))
    assume(spoiled.trains)  # without its only backward a schedule is a legal one for evaluation
    return spoiled, named


@UNHURRIED
@given(damaged())
def test_damage_is_found_and_named(case: tuple[Schedule, set[str]]) -> None:
    spoiled, named = case
    with pytest.raises(ScheduleError) as caught:
        check(spoiled)
    assert rule_of(caught.value) in named


@UNHURRIED
@given(legal_schedules(), st.data())
def test_a_swap_is_refused_exactly_when_it_cannot_run(made: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, row in enumerate(made.actions) if len(row) > 1]))
    row = list(made.actions[rank])
    one, other = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=2, max_size=2, unique=True))
    row[one], row[other] = row[other], row[one]
    swapped = replace(made, actions=(*made.actions[:rank], tuple(row), *made.actions[rank + 1 :]))
    if runs_to_the_end(swapped):
        check(swapped)
    else:
        with pytest.raises(ScheduleError) as caught:
            check(swapped)
        assert rule_of(caught.value) in {ORDER, MICROBATCHES, PROGRESS}


def runs_to_the_end(made: Schedule) -> bool:
    done: set[Action] = set()
    rows = [list(actions) for actions in made.actions]
    while any(rows):
        ready = [row for row in rows if row and can_run(row[0], done, made.stages)]
        if not ready:
            return False
        for row in ready:
            done.add(row.pop(0))
    return True


def rule_of(error: ScheduleError) -> str:
    found = re.match(r"rule '(.+?)' is broken on rank \d+ by \d+[FIWB]\d+: .+\.$", str(error))
    assert found, error
    return found[1]


F, INPUT = Action(1, Kind.F, 0), Action(0, Kind.I, 0)
SENT_F, SENT_INPUT = Action(0, Kind.F, 0), Action(1, Kind.I, 0)


def test_programs_that_send_to_each_other_before_posting_deadlock() -> None:
    first = (Send(SENT_F, 1), PostReceive(INPUT, 1), AwaitReceive(INPUT, 1))
    last = (Send(SENT_INPUT, 0), PostReceive(F, 0), AwaitReceive(F, 0))
    with pytest.raises(
        ScheduleError, match=r"rule 'no deadlock' is broken: rank 0 at Send\(.*; rank 1 at Send\("
    ):
        check_programs([first, last])
    check_programs([(first[1], first[0], first[2]), (last[1], last[0], last[2])])


def test_programs_that_wait_for_each_other_deadlock() -> None:
    first = (PostReceive(INPUT, 1), AwaitReceive(INPUT, 1), Send(SENT_F, 1))
    last = (PostReceive(F, 0), AwaitReceive(F, 0), Send(SENT_INPUT, 0))
    with pytest.raises(ScheduleError, match=r"rank 0 at AwaitReceive\(.*; rank 1 at AwaitReceive\("):
        check_programs([first, last])


def test_a_message_that_nobody_receives_is_told() -> None:
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: sent 1F0, received nothing"):
        check_programs([(Send(SENT_F, 1),), ()])
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: sent nothing, received 1F0"):
        check_programs([(), (PostReceive(F, 0), AwaitReceive(F, 0))])


def test_another_order_on_a_channel_is_told() -> None:
    second = replace(F, microbatch=1)
    receiver = (PostReceive(second, 0), AwaitReceive(second, 0), PostReceive(F, 0), AwaitReceive(F, 0))
    sender = (Send(SENT_F, 1), Send(replace(SENT_F, microbatch=1), 1))
    with pytest.raises(ScheduleError, match="sent 1F0 1F1, received 1F1 1F0"):
        check_programs([sender, receiver])


def test_awaiting_what_was_not_posted_yet_is_told() -> None:
    # Rank 1 sends 2I1 before 0I0, and rank 0 takes 0I0 before 2I1: only one of them is posted ahead.
    rows = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]
    crossing = written(rows, rank_of=(0, 1, 0, 1), microbatches=2)
    check(crossing)
    with pytest.raises(ScheduleError, match="sent 2I0 2I1 0I0 0I1, awaited 2I0 0I0 2I1 0I1"):
        check_programs(lower(crossing, Shape((1,) * 4, {})))


def test_a_program_without_one_of_its_instructions_is_refused() -> None:
    shape = Shape((1, 1), {"a": (Place(0, 0),), "b": (Place(1, 0),)})
    programs = lower(schedule("1f1b", ranks=2, microbatches=3), shape)
    check_programs(programs)
    for rank, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if isinstance(instruction, Send | PostReceive | AwaitReceive):
                changed = list(programs)
                changed[rank] = program[:position] + program[position + 1 :]
                with pytest.raises(ScheduleError, match="is broken"):
                    check_programs(changed)
