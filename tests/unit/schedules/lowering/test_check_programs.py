"""Programs that cannot run are refused, and only those: against a simulation that takes turns at random."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, legal_schedules, written

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import (
    AwaitReceive,
    Instruction,
    LayerIndex,
    LoweringSpec,
    PostReceive,
    Program,
    Send,
)
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

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


def test_programs_in_a_ring_deadlock() -> None:
    def program(rank: int) -> Program:
        taken = Action(rank or 3, Kind.F, 0)
        send = Send(Action(rank, Kind.F, 0), (rank + 1) % 3)
        return send, PostReceive(taken, (rank - 1) % 3), AwaitReceive(taken, (rank - 1) % 3)

    ring = [program(rank) for rank in range(3)]
    with pytest.raises(ScheduleError, match=r"rank 0 at Send\(.*; rank 1 at Send\(.*; rank 2 at Send\("):
        check_programs(ring)
    send, post, take = ring[1]
    check_programs([ring[0], (post, send, take), ring[2]])


def test_a_message_that_no_rank_receives_is_refused() -> None:
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: sent 1F0, received nothing"):
        check_programs([(Send(SENT_F, 1),), ()])
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: sent nothing, received 1F0"):
        check_programs([(), (PostReceive(F, 0), AwaitReceive(F, 0))])


def test_a_message_that_is_received_and_never_awaited_is_told() -> None:
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: 1F0 is received and never awaited"):
        check_programs([(Send(SENT_F, 1),), (PostReceive(F, 0),)])


@pytest.mark.parametrize("wrong", [(AwaitReceive(F, 0), PostReceive(F, 0)), (AwaitReceive(F, 0),)])
def test_awaiting_a_receive_before_it_is_posted_is_refused(wrong: Program) -> None:
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: 1F0 is awaited before it is received"):
        check_programs([(Send(SENT_F, 1),), wrong])


def test_awaiting_a_receive_twice_is_refused() -> None:
    twice = (PostReceive(F, 0), AwaitReceive(F, 0), AwaitReceive(F, 0))
    with pytest.raises(ScheduleError, match="between ranks 0 and 1: 1F0 is awaited before it is received"):
        check_programs([(Send(SENT_F, 1),), twice])


def test_receives_in_another_order_than_sends_are_refused() -> None:
    second = F._replace(microbatch=1)
    receiver = (PostReceive(second, 0), AwaitReceive(second, 0), PostReceive(F, 0), AwaitReceive(F, 0))
    sender = (Send(SENT_F, 1), Send(SENT_F._replace(microbatch=1), 1))
    with pytest.raises(ScheduleError) as caught:
        check_programs([sender, receiver])
    assert str(caught.value) == (
        "rule 'one order per channel' is broken between ranks 0 and 1: sent 1F0 1F1, received 1F1 1F0."
    )


def test_messages_may_be_taken_in_another_order_than_they_are_received() -> None:
    second = F._replace(microbatch=1)
    sender = (Send(SENT_F, 1), Send(SENT_F._replace(microbatch=1), 1))
    check_programs(
        [sender, (PostReceive(F, 0), PostReceive(second, 0), AwaitReceive(second, 0), AwaitReceive(F, 0))]
    )
    # One posted ahead is too few: rank 0 cannot send 1F1 and rank 1 wants nothing else.
    with pytest.raises(ScheduleError, match="awaited before it is received"):
        check_programs(
            [sender, (PostReceive(F, 0), AwaitReceive(second, 0), PostReceive(second, 0), AwaitReceive(F, 0))]
        )


def test_a_schedule_with_crossing_messages_runs() -> None:
    # Rank 1 sends 2I1 before 0I0, and rank 0 takes 0I0 before 2I1.
    rows = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]
    crossing = written(rows, rank_of=(0, 1, 0, 1), microbatches=2)
    check_programs(lower(crossing, LoweringSpec((1,) * 4, {})))


def test_directions_and_pairs_of_ranks_are_channels_of_their_own() -> None:
    # What goes forward does not hold up what goes back, though it was posted later.
    first = (PostReceive(INPUT, 1), Send(SENT_F, 1), AwaitReceive(INPUT, 1))
    last = (PostReceive(F, 0), Send(SENT_INPUT, 0), AwaitReceive(F, 0))
    check_programs([first, last])


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "interleaved", "v-half"])
def test_a_program_without_one_of_its_instructions_is_refused(policy: str) -> None:
    made = policy_schedule(policy, 2, 3)
    units = {str(stage): (LayerIndex(stage, 0),) for stage in range(made.stages)}
    programs = lower(made, LoweringSpec((1,) * made.stages, units))
    check_programs(programs)
    for rank, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if isinstance(instruction, Send | PostReceive | AwaitReceive):
                changed = list(programs)
                changed[rank] = program[:position] + program[position + 1 :]
                with pytest.raises(ScheduleError, match="is broken"):
                    check_programs(changed)


@UNHURRIED
@given(legal_schedules(), st.data())
def test_moved_instructions_are_refused_exactly_when_the_programs_get_stuck(
    made: Schedule, data: st.DataObject
) -> None:
    programs = [list(program) for program in lower(made, LoweringSpec((0,) * made.stages, {}))]
    for _ in range(data.draw(st.integers(1, 3))):
        program = data.draw(st.sampled_from(programs))
        places = st.integers(0, len(program) - 1)
        program.insert(data.draw(places), program.pop(data.draw(places)))
    if runs_in_random_turns(programs, data.draw(st.randoms(use_true_random=False))):
        check_programs([tuple(program) for program in programs])
    else:
        with pytest.raises(ScheduleError, match=r"rule 'no deadlock' is|rule 'one order per channel' is"):
            check_programs([tuple(program) for program in programs])


def runs_in_random_turns(programs: Sequence[Sequence[Instruction]], choose: Random) -> bool:
    """Whether every rank gets to its end: a send fills the first receive on its channel."""
    left = [deque(program) for program in programs]
    posted: dict[tuple[int, int, Kind], deque[Action]] = defaultdict(deque)
    waiting, arrived = set[Action](), set[Action]()

    def goes_on(rank: int) -> bool:
        match left[rank][0]:
            case PostReceive(action, peer):
                posted[peer, rank, action.kind].append(action)
                waiting.add(action)
            case Send((stage, kind, microbatch), peer):
                meant = Action(stage + 1 if kind is Kind.F else stage - 1, kind, microbatch)
                receives = posted[rank, peer, kind]
                if not receives or receives[0] != meant:
                    return False
                arrived.add(receives.popleft())
            case AwaitReceive(action):
                if action not in waiting & arrived:
                    return False
                waiting.remove(action)
        left[rank].popleft()
        return True

    ranks = list(range(len(programs)))
    while any(left):
        choose.shuffle(ranks)
        if not any(goes_on(rank) for rank in ranks if left[rank]):
            return False
    return not waiting
