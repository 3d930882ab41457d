"""Which results travel between ranks, and when their receives are posted.

A channel is a pair of ranks and a direction; its messages are received in the order in which they are sent.
A receive is posted as soon as the one before it on its channel was taken, so that one buffer waits ahead;
and at the latest when this rank has taken what it needs for its last action that is not after the step (see
`grid`) at which the sender makes the message. So whoever sends finds the receive posted, or the receiver on
its way there, also if every send is a rendezvous that blocks its rank: nothing can deadlock that could run
at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule

Channel: TypeAlias = tuple[int, int, Kind]
"""From rank, to rank, direction (`F` forward, `I` backward)."""


class Message(NamedTuple):
    """What `consumer` needs from rank `sender`; that rank's action at place `made` makes it."""

    consumer: Action
    sender: int
    made: int


AT_START = -1
"""A place before all actions."""
Inbox: TypeAlias = Mapping[int, tuple[Message, ...]]
"""The messages to a rank whose receives are posted at a place: when the action there took what it needs."""


def inboxes(schedule: Schedule) -> tuple[Inbox, ...]:
    """The messages to every rank."""
    channels: dict[Channel, list[Message]] = defaultdict(list)
    places: dict[tuple[int, Kind, int], int] = {}
    for rank, actions in enumerate(schedule.actions):
        for place, action in enumerate(actions):
            kind = needed_by(action).kind
            places[action.stage, kind, action.microbatch] = place
            consumer = action.consumer(schedule.stages)
            if consumer is not None and schedule.rank_of[consumer.stage] != rank:
                receiver = schedule.rank_of[consumer.stage]
                channels[rank, receiver, consumer.kind].append(Message(consumer, rank, place))
    return tuple(_inbox(rank, channels, places, schedule) for rank in range(schedule.ranks))


def needed_by(action: Action) -> Action:
    """`action` as the receiver of a message: a full backward receives as its input gradient does."""
    return Action(action.stage, Kind.I, action.microbatch) if action.kind is Kind.B else action


def _inbox(
    rank: int,
    channels: Mapping[Channel, list[Message]],
    places: Mapping[tuple[int, Kind, int], int],
    schedule: Schedule,
) -> Inbox:
    posted: dict[int, list[Message]] = defaultdict(list)
    steps = schedule.grid.steps[rank]
    for (sender, receiver, _), messages in channels.items():
        if receiver != rank:
            continue
        posted[AT_START].append(messages[0])
        place = reached = AT_START
        for before, message in pairwise(messages):
            made = schedule.grid.steps[sender][message.made]
            while reached + 1 < len(steps) and steps[reached + 1] <= made:
                reached += 1
            place = max(place, min(places[before.consumer], reached))
            posted[place].append(message)
    return {place: tuple(messages) for place, messages in posted.items()}
