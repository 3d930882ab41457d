"""Which results travel, and when their receives are posted: literals, and what holds for whatever can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given
from schedule_cases import UNHURRIED, legal_schedules, written

from plait.schedules.action import Action, Kind
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.messages import AT_START, StageMessage, inboxes
from plait.schedules.lowering.program import LoweringSpec
from plait.schedules.named_schedules import POLICIES, forward_only, policy_schedule
from plait.schedules.schedule import Schedule


def shown(schedule: Schedule) -> list[dict[str, str]]:
    """Per rank: behind which of its actions (`""`: at the start) it posts which receives, from which rank."""
    places = [{AT_START: ""} | dict(enumerate(map(str, row))) for row in schedule.actions]
    return [
        {
            names[place]: " ".join(f"{message.consumer}<{message.sender}" for message in messages)
            for place, messages in sorted(inbox.items())
        }
        for names, inbox in zip(places, inboxes(schedule), strict=True)
    ]


def test_a_full_backward_receives_as_its_input_gradient() -> None:
    assert Action(2, Kind.B, 1).message_key == Action(2, Kind.I, 1)
    for kind in (Kind.F, Kind.I, Kind.W):
        assert Action(2, kind, 1).message_key == Action(2, kind, 1)


def test_a_receive_is_posted_when_the_one_before_is_taken() -> None:
    assert shown(policy_schedule("1f1b", 3, 3)) == [
        {"": "0I0<1", "0B0": "0I1<1", "0B1": "0I2<1"},
        {"": "1F0<0 1I0<2", "1F0": "1F1<0", "1F1": "1F2<0", "1B0": "1I1<2", "1B1": "1I2<2"},
        {"": "2F0<1", "2F0": "2F1<1", "2F1": "2F2<1"},
    ]


def test_a_message_has_its_sender_and_the_place_of_its_send() -> None:
    _, last = inboxes(policy_schedule("gpipe", 2, 2))
    first, second = (StageMessage(Action(1, Kind.F, number), sender=0, made=number) for number in (0, 1))
    assert last == {AT_START: (first,), 0: (second,)}


def test_stages_on_one_rank_send_no_messages() -> None:
    assert inboxes(policy_schedule("gpipe", 1, 3)) == ({},)
    assert shown(written(["0F0 1F0 1B0 0B0", ""], rank_of=(0, 0), microbatches=1)) == [{}, {}]


def test_neighbours_in_a_v_hand_over_in_the_middle() -> None:
    folded = written(
        ["0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"], rank_of=(0, 1, 1, 0), microbatches=1
    )
    assert shown(folded) == [{"": "3F0<1 0I0<1"}, {"": "1F0<0 2I0<0"}]


def test_forward_only_schedules_send_messages() -> None:
    assert shown(forward_only((0, 1), ranks=2, microbatches=3)) == [
        {},
        {"": "1F0<0", "1F0": "1F1<0", "1F1": "1F2<0"},
    ]


def test_a_receive_is_posted_early_for_a_sender_that_will_not_wait() -> None:
    # Rank 1 sends 2I1 before 0I0, and rank 0 takes 0I0 before 2I1: both are posted when 2I0 is taken.
    rows = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]
    assert shown(written(rows, rank_of=(0, 1, 0, 1), microbatches=2)) == [
        {"": "2F0<1 2I0<1", "2F0": "2F1<1", "2B0": "2I1<1 0I0<1", "0B0": "0I1<1"},
        {"": "1F0<0 1I0<0", "1F0": "1F1<0", "1F1": "3F0<0", "3F0": "3F1<0", "1B0": "1I1<0"},
    ]


WAITING = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-h2": 2,
    "zb-v": 1,
    "v-half": 1,
    "v-min": 1,
}


@pytest.mark.parametrize("microbatches", [8, 16, 24])
@pytest.mark.parametrize("policy", POLICIES)
def test_receives_wait_in_few_buffers_however_many_microbatches(policy: str, microbatches: int) -> None:
    made = policy_schedule(policy, 4, microbatches)
    waiting = [len(ahead) for _, ahead in waiting_receives(made)]
    assert max(waiting) == WAITING[policy]


@UNHURRIED
@given(legal_schedules())
def test_every_runnable_schedule_gets_receives_that_cannot_deadlock(made: Schedule) -> None:
    check_programs(lower(made, LoweringSpec((0,) * made.stages, {})))


@UNHURRIED
@given(legal_schedules())
def test_every_message_is_received_once_in_the_order_of_sending(made: Schedule) -> None:
    posted = defaultdict(list)
    for receiver, inbox in enumerate(inboxes(made)):
        for place in sorted(inbox):
            for message in inbox[place]:
                posted[message.sender, receiver, message.consumer.kind].append(message)
    assert posted == messages_by_hand(made)


def messages_by_hand(made: Schedule) -> dict[tuple[int, int, Kind], list[StageMessage]]:
    found = defaultdict(list)
    for sender, row in enumerate(made.actions):
        for place, (stage, kind, microbatch) in enumerate(row):
            to, needs = (stage + 1, Kind.F) if kind is Kind.F else (stage - 1, Kind.I)
            if kind is not Kind.W and 0 <= to < made.stages and made.rank_of[to] != sender:
                message = StageMessage(Action(to, needs, microbatch), sender, place)
                found[sender, made.rank_of[to], needs].append(message)
    return found


@UNHURRIED
@given(legal_schedules())
def test_a_receive_is_posted_before_it_is_taken_and_in_time_for_its_sender(made: Schedule) -> None:
    for rank, inbox in enumerate(inboxes(made)):
        taken = {action.message_key: place for place, action in enumerate(made.actions[rank])}
        before: dict[tuple[int, Kind], int] = {}
        for place, messages in sorted(inbox.items()):
            for consumer, sender, made_by in messages:
                made_at = made.grid.steps[sender][made_by]
                assert place < taken[consumer]
                assert place == AT_START or made.grid.steps[rank][place] <= made_at
                assert place <= before.get((sender, consumer.kind), AT_START)
                before[sender, consumer.kind] = taken[consumer]


@UNHURRIED
@given(legal_schedules())
def test_of_the_receives_that_wait_one_at_most_is_for_what_nobody_makes_yet(made: Schedule) -> None:
    """At most one posted receive of a channel is for a message whose sender has not begun to compute it."""
    for coming, ahead in waiting_receives(made):
        assert sum(made.grid.steps[sender][made_by] >= coming for _, sender, made_by in ahead) <= 1


def waiting_receives(made: Schedule) -> Iterator[tuple[float, list[StageMessage]]]:
    """For each place and channel: the step of the rank's next action, and what is posted and not taken."""
    for rank, inbox in enumerate(inboxes(made)):
        ahead: dict[tuple[int, Kind], list[StageMessage]] = defaultdict(list)
        for place, step in enumerate((*made.grid.steps[rank], inf), start=AT_START):
            for message in inbox.get(place, ()):
                ahead[message.sender, message.consumer.kind].append(message)
            taken = made.actions[rank][place].message_key if place > AT_START else None
            for channel, messages in ahead.items():
                ahead[channel] = [message for message in messages if message.consumer != taken]
                yield step, ahead[channel]
