"""Lowering: from a schedule (stage actions) to one program per rank (instructions).

What is added, and where:

- around each action: where its input comes from (batch, message, hand-over) and where its result goes;
- inside each action: one instruction a layer, forwards in model order, backwards in reverse. A full
  backward whose result is sent does all of its `I` first, then sends, then does its `W`; one that nobody
  waits for does both at once, layer by layer, so that `W` can hide what `I` communicates;
- a receive is posted as soon as the one before it on the same channel was taken, so that exactly one
  buffer per channel waits ahead and memory does not grow with the number of micro-batches. A channel is
  a pair of ranks and a direction; its messages are received in the order in which they are sent;
- the reduction of a unit follows the last weight gradient that goes into it. Units that several ranks of
  the `pp` axis hold come last, in one order for all ranks, so no two ranks wait for each other crosswise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.schedules.action import Action, Kind
from plait.schedules.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    HandOver,
    Instruction,
    KeepOutput,
    PostReceive,
    Program,
    ReduceGradient,
    Release,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.schedules.schedule import Schedule

Ending = Literal["loss", "output"]


class Place(NamedTuple):
    """A layer of the model, by its stage and its number within the stage."""

    stage: int
    layer: int


@dataclass(frozen=True)
class Shape:
    """What lowering must know beside the schedule."""

    layers: tuple[int, ...]
    """Per stage."""
    units: Mapping[str, tuple[Place, ...]]
    """Which layers feed which unit's gradient."""
    overlap: bool | None = None
    """Whether a full backward does `I` and `W` of a layer at once. None: where nobody waits for it."""


def lower(schedule: Schedule, shape: Shape, ending: Ending = "loss") -> tuple[Program, ...]:
    """One program per rank of the `pp` axis. `ending` says what the last stage does with its output."""
    messages = [_messages_to(schedule, rank) for rank in range(schedule.ranks)]
    return tuple(_lower_rank(schedule, shape, ending, rank, messages[rank]) for rank in range(schedule.ranks))


def source_of(action: Action, schedule: Schedule) -> int | None:
    """The stage whose result `action` starts from: before for a forward, behind for a backward, or none."""
    if action.kind is Kind.F:
        return action.stage - 1 if action.stage > 0 else None
    if action.kind is Kind.W:
        return None
    return action.stage + 1 if action.stage + 1 < schedule.stages else None


def consumer_of(action: Action, schedule: Schedule) -> Action | None:
    """The action on another stage that waits for the result of `action`: a forward or an input gradient."""
    if action.kind is Kind.F and action.stage + 1 < schedule.stages:
        return Action(action.stage + 1, Kind.F, action.microbatch)
    if action.kind in (Kind.I, Kind.B) and action.stage > 0:
        return Action(action.stage - 1, Kind.I, action.microbatch)
    return None


def _needed_by(action: Action) -> Action:
    """`action` as the receiver of a message: a full backward receives as its input gradient does."""
    return Action(action.stage, Kind.I, action.microbatch) if action.kind is Kind.B else action


Channel = tuple[int, Kind]
"""The sending rank, and the direction: `F` forward, `I` backward."""


def _messages_to(schedule: Schedule, rank: int) -> dict[Channel, list[Action]]:
    """For each channel into `rank`: the actions that wait for its messages, in the order of sending."""
    channels: dict[Channel, list[Action]] = {}
    for sender in range(schedule.ranks):
        for action in schedule.actions[sender]:
            consumer = consumer_of(action, schedule)
            if consumer is not None and sender != rank == schedule.rank_of[consumer.stage]:
                channels.setdefault((sender, consumer.kind), []).append(consumer)
    return channels


def _lower_rank(
    schedule: Schedule, shape: Shape, ending: Ending, rank: int, channels: dict[Channel, list[Action]]
) -> Program:
    program: list[Instruction] = []
    waiting = {channel: iter(consumers) for channel, consumers in channels.items()}

    def post_next(channel: Channel) -> None:
        following = next(waiting[channel], None)
        if following is not None:
            program.append(PostReceive(following, channel[0]))

    for channel in channels:
        post_next(channel)
    reductions = _reductions(schedule, shape, rank)
    for action in schedule.actions[rank]:
        for instruction in _lower_action(action, schedule, shape, ending):
            program.append(instruction)
            if isinstance(instruction, AwaitReceive):
                post_next((instruction.peer, instruction.action.kind))
            elif isinstance(instruction, RunLayer):
                program.extend(reductions.get(instruction, ()))
    if schedule.trains:
        program.extend(ReduceGradient(unit) for unit in _spanning(schedule, shape, rank))
    program.append(Finish())
    return tuple(program)


def _lower_action(action: Action, schedule: Schedule, shape: Shape, ending: Ending) -> Iterator[Instruction]:
    stage = action.stage
    last = stage + 1 == schedule.stages
    yield from _input_of(action, schedule)
    if action.kind is Kind.F:
        for layer in range(shape.layers[stage]):
            yield RunLayer(action, layer)
        if last:
            yield ComputeLoss(action) if ending == "loss" else KeepOutput(action)
        yield from _result_of(action, schedule)
    else:
        yield from _backward(action, schedule, shape)
    if action.kind in (Kind.W, Kind.B) or not schedule.trains:
        yield Release(action)


def _backward(action: Action, schedule: Schedule, shape: Shape) -> Iterator[Instruction]:
    """`I`, `W`, or both: at once where nobody waits (or as told), else all of `I` first, to send early."""
    result = tuple(_result_of(action, schedule))
    at_once = not result if shape.overlap is None else shape.overlap
    split = action.kind is Kind.B and not at_once
    first, *later = (Kind.I, Kind.W) if split else (action.kind,)
    layers = range(shape.layers[action.stage])[::-1]
    yield from (RunLayer(Action(action.stage, first, action.microbatch), layer) for layer in layers)
    yield from result
    for kind in later:
        yield from (RunLayer(Action(action.stage, kind, action.microbatch), layer) for layer in layers)


def _result_of(action: Action, schedule: Schedule) -> Iterator[Send]:
    consumer = consumer_of(action, schedule)
    if consumer is not None and schedule.rank_of[consumer.stage] != schedule.rank_of[action.stage]:
        yield Send(_needed_by(action), schedule.rank_of[consumer.stage])


def _input_of(action: Action, schedule: Schedule) -> Iterator[Instruction]:
    source, wanted = source_of(action, schedule), _needed_by(action)
    if source is not None:
        owner = schedule.rank_of[source]
        local = owner == schedule.rank_of[action.stage]
        yield HandOver(wanted) if local else AwaitReceive(wanted, owner)
    elif action.kind is Kind.F:
        yield TakeBatch(action)
    elif action.kind is not Kind.W:
        yield SeedGradient(wanted)


def _holders(schedule: Schedule, places: Sequence[Place]) -> set[int]:
    return {schedule.rank_of[place.stage] for place in places}


def _spanning(schedule: Schedule, shape: Shape, rank: int) -> Iterator[str]:
    """Units that `rank` holds together with other ranks of the `pp` axis: parameters tied across stages."""
    for unit, places in shape.units.items():
        holders = _holders(schedule, places)
        if rank in holders and len(holders) > 1:
            yield unit


def _reductions(schedule: Schedule, shape: Shape, rank: int) -> dict[RunLayer, list[ReduceGradient]]:
    """After which layer's weight gradient each unit of this rank alone is final."""
    done_at = {
        (action.stage, action.kind, action.microbatch): position
        for position, action in enumerate(schedule.actions[rank])
    }

    def finished(place: Place) -> tuple[int, int]:
        final = schedule.microbatches - 1
        kind = Kind.W if (place.stage, Kind.W, final) in done_at else Kind.B
        return done_at[place.stage, kind, final], -place.layer

    reductions: dict[RunLayer, list[ReduceGradient]] = {}
    for unit, places in shape.units.items():
        if schedule.trains and _holders(schedule, places) == {rank}:
            stage, layer = max(places, key=finished)
            # The last weight gradient is computed by itself, or at once with the input gradient.
            for kind in (Kind.W, Kind.B):
                run = RunLayer(Action(stage, kind, schedule.microbatches - 1), layer)
                reductions.setdefault(run, []).append(ReduceGradient(unit))
    return reductions
