"""Lowering: from a schedule (stage actions) to one program per rank (instructions).

What is added, and where:

- around each action: where its input comes from (batch, message, hand-over) and where its result goes;
- inside each action: one instruction a layer, forwards in model order, backwards in reverse. A full
  backward whose result is sent does all of its `I` first, then sends, then does its `W`; one that nobody
  waits for does both at once, layer by layer, so that `W` can hide what `I` communicates;
- the receives of messages are posted ahead, in the order of sending (see `messages`);
- the gathering of parameters (see `gathering`) and the reduction of gradients (see `reducing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from plait.schedules.action import Action, Kind
from plait.schedules.gathering import with_gathers
from plait.schedules.messages import AT_START, Inbox, Message, inboxes, needed_by
from plait.schedules.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    HandOver,
    Instruction,
    KeepOutput,
    PostReceive,
    Program,
    Release,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.schedules.reducing import with_reductions
from plait.schedules.schedule import Schedule
from plait.schedules.shape import Place, Shape

Ending = Literal["loss", "output"]


def lower(schedule: Schedule, shape: Shape, ending: Ending = "loss") -> tuple[Program, ...]:
    """One program per rank of the `pp` axis. `ending` says what the last stage does with its output."""
    return tuple(
        _lower_rank(schedule, shape, ending, rank, inbox) for rank, inbox in enumerate(inboxes(schedule))
    )


def _lower_rank(schedule: Schedule, shape: Shape, ending: Ending, rank: int, inbox: Inbox) -> Program:
    program: list[Instruction] = [_post(message) for message in inbox.get(AT_START, ())]
    for place, action in enumerate(schedule.actions[rank]):
        program += _input_of(action, schedule)
        program += map(_post, inbox.get(place, ()))
        program += _lower_action(action, schedule, shape, ending)
    lowered = tuple(program)
    if schedule.trains:
        lowered = with_reductions(lowered, shape, list(_spanning(schedule, shape, rank)))
    return (*with_gathers(lowered, shape), Finish())


def _post(message: Message) -> PostReceive:
    return PostReceive(message.consumer, message.sender)


def _lower_action(action: Action, schedule: Schedule, shape: Shape, ending: Ending) -> list[Instruction]:
    stage, kind = action.stage, action.kind
    if kind is Kind.F:
        lowered: list[Instruction] = [RunLayer(action, layer) for layer in range(shape.layers[stage])]
        if stage + 1 == schedule.stages:
            lowered.append(ComputeLoss(action) if ending == "loss" else KeepOutput(action))
        lowered += _result_of(action, schedule)
    else:
        lowered = _backward(action, schedule, shape)
    if kind in (Kind.W, Kind.B) or not schedule.trains:
        lowered.append(Release(action))
    return lowered


def _backward(action: Action, schedule: Schedule, shape: Shape) -> list[Instruction]:
    """`I`, `W`, or both: at once where nobody waits (or as told), else all of `I` first, to send early."""
    stage, kind, microbatch = action
    result = _result_of(action, schedule)
    at_once = not result if shape.overlap is None else shape.overlap
    first, *later = (Kind.I, Kind.W) if kind is Kind.B and not at_once else (kind,)
    layers = range(shape.layers[stage])[::-1]
    lowered: list[Instruction] = [RunLayer(Action(stage, first, microbatch), layer) for layer in layers]
    lowered += result
    for second in later:
        lowered += [RunLayer(Action(stage, second, microbatch), layer) for layer in layers]
    return lowered


def _result_of(action: Action, schedule: Schedule) -> list[Send]:
    consumer = action.consumer(schedule.stages)
    if consumer is None or schedule.rank_of[consumer.stage] == schedule.rank_of[action.stage]:
        return []
    return [Send(needed_by(action), schedule.rank_of[consumer.stage])]


def _input_of(action: Action, schedule: Schedule) -> list[Instruction]:
    if action.kind is Kind.W:
        return []
    source, wanted = action.source(schedule.stages), needed_by(action)
    if source is None:
        return [TakeBatch(action) if action.kind is Kind.F else SeedGradient(wanted)]
    owner = schedule.rank_of[source]
    local = owner == schedule.rank_of[action.stage]
    return [HandOver(wanted) if local else AwaitReceive(wanted, owner)]


def _holders(schedule: Schedule, places: Sequence[Place]) -> set[int]:
    return {schedule.rank_of[place.stage] for place in places}


def _spanning(schedule: Schedule, shape: Shape, rank: int) -> Iterator[str]:
    """Units that `rank` holds together with other ranks of the `pp` axis: parameters tied across stages."""
    for unit, places in shape.units.items():
        holders = _holders(schedule, places)
        if rank in holders and len(holders) > 1:
            yield unit
