"""Lowering: from a schedule (stage actions) to one program per rank (instructions).

What is added, and where:

- around each action: where its input comes from (batch, message, same rank) and where its result goes;
- inside each action: one instruction per layer, forwards in model order, backwards in reverse. A full
  backward whose result is sent runs all of its `I` first, then sends, then runs its `W`; one whose result no
  rank waits for runs both layer by layer, so that `W` can hide the communication of `I`;
- the receives of messages are posted ahead, in the order of sending (see `messages`);
- gathers of parameters and reductions of gradients (see `unit_passes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plait.plan.plan import weights_at_once
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.messages import AT_START, Inbox, StageMessage, inboxes
from plait.schedules.lowering.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    Instruction,
    KeepOutput,
    LocalTransfer,
    LoweringSpec,
    PostReceive,
    Program,
    ReleaseBuffers,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.schedules.lowering.unit_passes import insert_gathers, insert_reductions
from plait.schedules.schedule import Schedule

Ending = Literal["loss", "output"]


def lower(schedule: Schedule, spec: LoweringSpec, ending: Ending = "loss") -> tuple[Program, ...]:
    """Return one program (instructions) per rank of `pp`; `ending`: compute the loss or keep the output."""
    return tuple(
        _lower_rank(schedule, spec, ending, rank, inbox)
        for rank, inbox in enumerate(inboxes(schedule, late=spec.posts_late))
    )


def _lower_rank(schedule: Schedule, spec: LoweringSpec, ending: Ending, rank: int, inbox: Inbox) -> Program:
    program: list[Instruction] = [_post(message) for message in inbox.get(AT_START, ())]
    for position, action in enumerate(schedule.actions[rank]):
        program += _input_of(action, schedule)
        program += map(_post, inbox.get(position, ()))
        program += _lower_action(action, schedule, spec, ending)
    lowered = tuple(program)
    if schedule.trains:
        lowered = insert_reductions(lowered, spec, list(_tied_units(schedule, spec, rank)))
    return (*insert_gathers(lowered, spec), Finish())


def _post(message: StageMessage) -> PostReceive:
    return PostReceive(message.consumer, message.sender)


def _lower_action(
    action: Action, schedule: Schedule, spec: LoweringSpec, ending: Ending
) -> list[Instruction]:
    stage, kind = action.stage, action.kind
    if kind is Kind.F:
        lowered: list[Instruction] = [RunLayer(action, layer) for layer in range(spec.layers[stage])]
        if stage + 1 == schedule.stages:
            lowered.append(ComputeLoss(action) if ending == "loss" else KeepOutput(action))
        lowered += _sends(action, schedule)
    else:
        lowered = _backward(action, schedule, spec)
    if kind in (Kind.W, Kind.B) or not schedule.trains:
        lowered.append(ReleaseBuffers(action))
    return lowered


def _backward(action: Action, schedule: Schedule, spec: LoweringSpec) -> list[Instruction]:
    """Return a backward's instructions; `spec.overlap` decides if `B` runs per layer or all `I` first."""
    sends = _sends(action, schedule)
    layerwise = weights_at_once(spec.overlap, sends=bool(sends))
    first, *later = [action]
    if action.kind is Kind.B and not layerwise:
        first, later = action.message_key, [action._replace(kind=Kind.W)]
    layers = range(spec.layers[action.stage])[::-1]
    lowered: list[Instruction] = [RunLayer(first, layer) for layer in layers]
    lowered += sends
    lowered += (RunLayer(second, layer) for second in later for layer in layers)
    return lowered


def _sends(action: Action, schedule: Schedule) -> list[Send]:
    consumer = action.consumer(schedule.stages)
    if consumer is None or schedule.rank_of[consumer.stage] == schedule.rank_of[action.stage]:
        return []
    return [Send(action.message_key, schedule.rank_of[consumer.stage])]


def _input_of(action: Action, schedule: Schedule) -> list[Instruction]:
    if action.kind is Kind.W:
        return []
    source, key = action.source_stage(schedule.stages), action.message_key
    if source is None:
        return [TakeBatch(action) if action.kind is Kind.F else SeedGradient(key)]
    owner = schedule.rank_of[source]
    local = owner == schedule.rank_of[action.stage]
    return [LocalTransfer(key) if local else AwaitReceive(key, owner)]


def _tied_units(schedule: Schedule, spec: LoweringSpec, rank: int) -> Iterator[str]:
    """Yield the units (parameters gathered together) that both `rank` and another rank of `pp` use."""
    for unit, layers in spec.units.items():
        owners = {schedule.rank_of[layer.stage] for layer in layers}
        if rank in owners and len(owners) > 1:
            yield unit
