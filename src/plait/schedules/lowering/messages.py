"""Messages between ranks, and the positions at which their receives are posted.

A channel is a pair of ranks and a direction; its messages are received in the order in which they are sent.
A receive is posted as soon as the previous one on its channel was awaited, so that one buffer waits ahead;
and at the latest when this rank has received the input of its last action that is not after the step (see
`Grid`) of the sending action. So the sender finds the receive posted, or the receiver on its way to post
it, even if every send is a rendezvous that blocks its rank: posting order adds no deadlock.

On NCCL a posted receive is a kernel that occupies its GPU until the message comes, and a send blocks no host:
there a receive is posted when the action before the one that needs it has its own input, or earlier where
messages are needed in another order than they are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule

Channel: TypeAlias = tuple[int, int, Kind]
"""Sending rank, receiving rank, and `F` for activations or `I` for gradients.

Each has a communicator of its own, since the operations of one run in order: a receive that is posted ahead
would hold up every message behind it (`check_programs` proves that channels are enough).
"""
SENDS_IN_FLIGHT = 2
"""Sends of a channel that have started and are not complete. More would hold tensors longer: one receive is
posted ahead."""


class StageMessage(NamedTuple):
    """A message between ranks: the result of rank `sender`'s action number `made`, needed by `consumer`."""

    consumer: Action
    sender: int
    made: int


AT_START = -1
"""Position before all actions."""
Inbox: TypeAlias = Mapping[int, tuple[StageMessage, ...]]
"""By position in a rank's order: the messages whose receives are posted when that action has its input."""


def channels_of(schedule: Schedule) -> tuple[Channel, ...]:
    """Return the channels (sender, receiver, `F` or `I`) between the ranks of neighbouring stages, sorted."""
    pairs = {(a, b) for a, b in pairwise(schedule.rank_of) if a != b}
    return tuple(sorted({*((a, b, Kind.F) for a, b in pairs), *((b, a, Kind.I) for a, b in pairs)}))


def inboxes(schedule: Schedule, *, late: bool = False) -> tuple[Inbox, ...]:
    """Return each rank's messages to receive, by the number of the action before which to post the receive.

    `late`: one action ahead, as on NCCL.
    """
    channels: dict[Channel, list[StageMessage]] = defaultdict(list)
    positions: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            positions[action.message_key] = position
            consumer = action.consumer(schedule.stages)
            if consumer is not None and schedule.rank_of[consumer.stage] != rank:
                receiver = schedule.rank_of[consumer.stage]
                channels[rank, receiver, consumer.kind].append(StageMessage(consumer, rank, position))
    inbox = _late_inbox if late else _early_inbox
    incoming: list[list[list[StageMessage]]] = [[] for _ in schedule.actions]
    for (_, receiver, _), messages in channels.items():
        incoming[receiver].append(messages)
    return tuple(inbox(rank, incoming[rank], positions, schedule) for rank in range(schedule.ranks))


def _late_inbox(
    rank: int, channels: Sequence[list[StageMessage]], positions: Mapping[Action, int], schedule: Schedule
) -> Inbox:
    posted: dict[int, list[StageMessage]] = defaultdict(list)
    for messages in channels:
        position = len(schedule.actions[rank])
        for message in reversed(messages):  # no later than one that is sent after it
            position = min(position, positions[message.consumer] - 1)
            posted[position].insert(0, message)
    return {position: tuple(messages) for position, messages in posted.items()}


def _early_inbox(
    rank: int, channels: Sequence[list[StageMessage]], positions: Mapping[Action, int], schedule: Schedule
) -> Inbox:
    posted: dict[int, list[StageMessage]] = defaultdict(list)
    steps = schedule.grid.steps
    for messages in channels:
        posted[AT_START].append(messages[0])
        position = reached = AT_START
        for previous, message in pairwise(messages):
            made = steps[message.sender][message.made]
            while reached + 1 < len(steps[rank]) and steps[rank][reached + 1] <= made:
                reached += 1
            position = max(position, min(positions[previous.consumer], reached))
            posted[position].append(message)
    return {position: tuple(messages) for position, messages in posted.items()}


class _HasAction(Protocol):
    @property
    def action(self) -> Action: ...


Entry = TypeVar("Entry", bound=_HasAction)


def sends_and_receives(rows: Sequence[Sequence[Entry]], schedule: Schedule) -> Iterator[tuple[Entry, Entry]]:
    """Yield for each message between ranks the entries of `rows` that send and that receive it."""
    receivers = {entry.action.message_key: entry for row in rows for entry in row}
    rank_of = schedule.rank_of
    for entry in (entry for row in rows for entry in row):
        consumer = entry.action.consumer(schedule.stages)
        if consumer in receivers and rank_of[consumer.stage] != rank_of[entry.action.stage]:
            yield entry, receivers[consumer]
