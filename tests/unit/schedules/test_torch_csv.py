"""Schedules as CSV: there and back, what is overlooked, and what is refused at which line and column."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, legal_schedules, written

from plait.errors import ScheduleError
from plait.schedules.check import check
from plait.schedules.named_schedules import POLICIES, policy_schedule
from plait.schedules.schedule import Schedule
from plait.schedules.torch_csv import from_csv, to_csv

TWO_RANKS = written(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], rank_of=(0, 1), microbatches=2)
IN_A_V = written(["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0"], rank_of=(0, 1, 1, 0), microbatches=1)


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(POLICIES)))
    chunks = draw(st.integers(1, 3)) if name == "interleaved" else None
    return policy_schedule(name, draw(st.integers(1, 6)), draw(st.integers(1, 9)), chunks)


def test_the_csv_has_a_line_per_rank_and_a_cell_per_action() -> None:
    assert to_csv(TWO_RANKS) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_stages_ranks_and_microbatches_follow_from_the_actions() -> None:
    assert from_csv("0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1B0\n", "by hand") == IN_A_V
    assert from_csv("0F0,0F1,0F2").microbatches == 3
    assert from_csv("1F0\n0F0").rank_of == (1, 0)


def test_the_policy_is_the_given_name() -> None:
    assert (from_csv("0F0").policy, from_csv("0F0", "found on a shelf").policy) == ("csv", "found on a shelf")


@UNHURRIED
@given(st.one_of(named_schedules(), legal_schedules()))
def test_a_schedule_survives_conversion_to_csv_and_back(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), schedule.policy) == schedule


@UNHURRIED
@given(named_schedules(), st.randoms(use_true_random=False))
def test_idle_steps_spaces_and_quotes_change_nothing(schedule: Schedule, chance: Random) -> None:
    forms = ["{}", " {} ", "\t{}", '"{}"', ' " {}" ', ",{}", " ,,{}", "{}, ", '{},""']
    lines = [",".join(chance.choice(forms).format(action) for action in rank) for rank in schedule.order]
    text = chance.choice(["\n", "\r\n"]).join(lines)
    assert from_csv(chance.choice(["", "\ufeff"]) + text, schedule.policy) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n",
        "0F0,0F1,0B0,0B1,,\n,,1F0,1B0,1F1,1B1,",
        " 0F0, 0F1 ,0B0 ,0B1\n1F0,\t1B0,1F1, 1B1 \n",
        "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
        "\ufeff0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n\n  \n",
        '"0F0","0F1","0B0","0B1"\n"1F0","1B0","1F1","1B1"\n',
    ],
    ids=["idle steps", "trailing commas", "spaces", "CRLF", "byte-order mark", "last lines empty", "quotes"],
)
def test_csvs_with_other_spacing_and_padding_are_read(text: str) -> None:
    assert from_csv(text, "by hand") == TWO_RANKS


def test_a_paired_csv_cell_is_a_forward_then_a_backward() -> None:
    text = "0F0,1F0,0F1,( 1F1 ; 1B0 )OVERLAP_F_B,0B0,(1I1;0I1)OVERLAP_F_B,1W1,0W1"
    read = from_csv(text)
    assert read.order == (("0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1I1", "0I1", "1W1", "0W1"),)
    check(read)


NO_ACTION = "is not an action: write stage, kind (F, I, W or B) and micro-batch, as in 2F0."
COMMUNICATION = (
    "is from a file of communication actions, which plait adds by itself; give the compute-only file, as "
    "PyTorch's _dump_csv writes it with format='compute_only'."
)
REFUSED = {
    "0F0,0F1\n,1F0,,,xx,1F1": f"line 2, column 5: 'xx' {NO_ACTION}",
    "0F0,0F1;0F2": f"line 1, column 2: '0F1;0F2' {NO_ACTION}",
    "\ufeff0f0,0F1": f"line 1, column 1: '0f0' {NO_ACTION}",
    "0F0\r\n1F0,-1F1": f"line 2, column 2: '-1F1' {NO_ACTION}",
    "rank 0,0F0": f"line 1, column 1: 'rank 0' {NO_ACTION}",
    "0F0,0X0": f"line 1, column 2: '0X0' {NO_ACTION}",
    "0F0,0F1,(0F2;0)OVERLAP_F_B": f"line 1, column 3: '0' {NO_ACTION}",
    "0F0,(0F1;0B0)": f"line 1, column 2: '(0F1;0B0)' {NO_ACTION}",
    "0F0,(0F1;0B0)OVERLAP": f"line 1, column 2: '(0F1;0B0)OVERLAP' {NO_ACTION}",
    "0F0,(0F1;0B0)OVERLAP_F_B0": f"line 1, column 2: '(0F1;0B0)OVERLAP_F_B0' {NO_ACTION}",
    "0F0,(0F1;0B0;0F2)OVERLAP_F_B": f"line 1, column 2: '(0F1;0B0;0F2)OVERLAP_F_B' {NO_ACTION}",
    "0F0,0SENT_F0": f"line 1, column 2: '0SENT_F0' {NO_ACTION}",
    "0F0\n1F0,2F0,0B0": (
        "line 2, column 3: 0B0 is of stage 0, which has an action in line 1, column 1 too; "
        "a stage is on one rank: write its actions on one line."
    ),
    "0F0\n1F0,3F0\n4F0": (
        "line 2, column 2: there is a stage 3 but no stage 2; number stages from 0, without gaps."
    ),
    "1F0,1B0": "line 1, column 1: there is a stage 1 but no stage 0; number stages from 0, without gaps.",
    "0F0\n\n1F0": "line 2: rank 1 has no actions; write a line per rank, each with at least one.",
    "0F0\n,, ,\n1F0": "line 2: rank 1 has no actions; write a line per rank, each with at least one.",
    "\n0F0": "line 1: rank 0 has no actions; write a line per rank, each with at least one.",
    "0F0\n,,": "line 2: rank 1 has no actions; write a line per rank, each with at least one.",
    "": "the CSV is empty: write a line per rank with its actions, as in 0F0,0F1,0B0,0B1.",
    "\ufeff \r\n": "the CSV is empty: write a line per rank with its actions, as in 0F0,0F1,0B0,0B1.",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=map(repr, REFUSED))
def test_a_malformed_csv_is_refused_with_line_and_column(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        from_csv(text)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "action", ["0UNSHARD", "0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0", "0RESHARD", "0REDUCE_GRAD"]
)
def test_a_file_of_communication_actions_is_told_as_such(action: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        from_csv(f"0F0,{action},0B0\n1F0,1B0")
    assert str(refusal.value) == f"line 1, column 2: {action} {COMMUNICATION}"


@UNHURRIED
@given(st.text(alphabet='0123FIWBX,;()"\n\r \ufeffOVERLAP_S', max_size=40))
def test_any_csv_text_is_a_schedule_or_refused(text: str) -> None:
    try:
        read = from_csv(text)
    except ScheduleError:
        return
    assert from_csv(to_csv(read)) == read


def test_a_csv_of_a_schedule_that_cannot_run_is_read() -> None:
    for text, rule in [("0F0,0B0,0F0", "every action once"), ("0B0,0F0", "forward, input, weights")]:
        with pytest.raises(ScheduleError, match=f"rule '{rule}' is broken on rank 0"):
            check(from_csv(text))
