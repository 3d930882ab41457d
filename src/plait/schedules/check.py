"""Legality, as a table of rules. What breaks one is refused before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.lower import source_of
from plait.schedules.program import AwaitReceive, Instruction, PostReceive, Program, Send
from plait.schedules.schedule import Schedule


class Violation(NamedTuple):
    """A broken rule: on which rank, by which action, and why."""

    rank: int
    action: Action
    why: str


def check(schedule: Schedule) -> None:
    """ScheduleError that names the rule, the rank and the action, unless every rule holds."""
    for rule, broken in RULES.items():
        for rank, action, why in broken(schedule):
            raise ScheduleError(f"rule {rule!r} is broken on rank {rank} by {action}: {why}.")


def check_programs(programs: Sequence[Program]) -> None:
    """ScheduleError when the programs could wait for each other for ever.

    Sends are modelled as rendezvous that block their rank until the receive is posted, which is stricter
    than what runs (sends are asynchronous). Each channel must also carry its messages in one order: sent,
    posted and awaited alike.
    """
    _check_channel_order(programs)
    posted: dict[Channel, int] = defaultdict(int)
    sent: dict[Channel, int] = defaultdict(int)
    taken: dict[Channel, int] = defaultdict(int)
    counters = [0] * len(programs)

    def can_pass(rank: int, instruction: Instruction) -> bool:
        match instruction:
            case PostReceive(action, peer):
                posted[peer, rank, action.kind] += 1
            case Send(action, peer):
                channel = rank, peer, action.kind
                if posted[channel] <= sent[channel]:
                    return False
                sent[channel] += 1
            case AwaitReceive(action, peer):
                channel = peer, rank, action.kind
                if sent[channel] <= taken[channel]:
                    return False
                taken[channel] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while counters[rank] < len(program) and can_pass(rank, program[counters[rank]]):
                counters[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {program[counters[rank]]}"
        for rank, program in enumerate(programs)
        if counters[rank] < len(program)
    ]
    if stuck:
        raise ScheduleError(f"rule 'no deadlock' is broken: {'; '.join(stuck)} wait for each other.")


Channel = tuple[int, int, Kind]
"""From rank, to rank, direction (`F` forward, `I` backward)."""


def _check_channel_order(programs: Sequence[Program]) -> None:
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    awaits: dict[Channel, list[Action]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for instruction in program:
            if isinstance(instruction, Send):
                step = 1 if instruction.action.kind is Kind.F else -1
                consumer = Action(
                    instruction.action.stage + step, instruction.action.kind, instruction.action.microbatch
                )
                sends[rank, instruction.peer, consumer.kind].append(consumer)
            elif isinstance(instruction, PostReceive):
                receives[instruction.peer, rank, instruction.action.kind].append(instruction.action)
            elif isinstance(instruction, AwaitReceive):
                awaits[instruction.peer, rank, instruction.action.kind].append(instruction.action)
    for channel in sorted({*sends, *receives, *awaits}):
        for what, taken in (("received", receives[channel]), ("awaited", awaits[channel])):
            if sends[channel] != taken:
                raise ScheduleError(
                    f"rule 'one order per channel' is broken between ranks {channel[0]} and {channel[1]}: "
                    f"sent {_listed(sends[channel])}, {what} {_listed(taken)}."
                )


def _listed(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions)) or "nothing"


def _placement(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.stage >= schedule.stages or schedule.rank_of[action.stage] != rank:
                yield Violation(rank, action, "the stage does not live there")


def _once(schedule: Schedule) -> Iterator[Violation]:
    seen: dict[Action, int] = defaultdict(int)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            seen[action] += 1
            if seen[action] > 1:
                yield Violation(rank, action, "it stands there twice")
    for stage, rank in enumerate(schedule.rank_of):
        for microbatch in range(schedule.microbatches):
            have = {kind: seen[Action(stage, kind, microbatch)] for kind in Kind}
            if not have[Kind.F]:
                yield Violation(rank, Action(stage, Kind.F, microbatch), "it is missing")
            if schedule.trains and have[Kind.B] + have[Kind.I] != 1:
                yield Violation(rank, Action(stage, Kind.I, microbatch), "give I and W, or one B")
            if schedule.trains and have[Kind.B] + have[Kind.W] != 1:
                yield Violation(rank, Action(stage, Kind.W, microbatch), "give I and W, or one B")
    for action, count in seen.items():
        if count and action.microbatch >= schedule.microbatches:
            yield Violation(schedule.rank_of[action.stage], action, "there is no such micro-batch")


_NEEDS = {Kind.F: (), Kind.I: (Kind.F,), Kind.B: (Kind.F,), Kind.W: (Kind.F, Kind.I)}


def _order(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action in actions:
            for kind in _NEEDS[action.kind]:
                if Action(action.stage, kind, action.microbatch) not in done:
                    yield Violation(rank, action, f"{kind} of its stage and micro-batch has to come first")
            done.add(action)


def _microbatch_order(schedule: Schedule) -> Iterator[Violation]:
    for rank, actions in enumerate(schedule.actions):
        following: dict[tuple[int, Kind], int] = defaultdict(int)
        for action in actions:
            kinds = {Kind.F: (), Kind.B: (Kind.I, Kind.W)}.get(action.kind, (action.kind,))
            for kind in kinds:
                if action.microbatch != following[action.stage, kind]:
                    due = following[action.stage, kind]
                    why = f"{kind} of micro-batch {due} is due (same sums, any schedule)"
                    yield Violation(rank, action, why)
                following[action.stage, kind] += 1


def _progress(schedule: Schedule) -> Iterator[Violation]:
    done: set[Action] = set()
    counters = [0] * schedule.ranks
    moved = True

    def ready(action: Action) -> bool:
        source = source_of(action, schedule)
        if source is None:
            return True
        if action.kind is Kind.F:
            return Action(source, Kind.F, action.microbatch) in done
        return bool(done & {Action(source, kind, action.microbatch) for kind in (Kind.I, Kind.B)})

    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while counters[rank] < len(actions) and ready(actions[counters[rank]]):
                done.add(actions[counters[rank]])
                counters[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.actions):
        if counters[rank] < len(actions):
            action = actions[counters[rank]]
            yield Violation(rank, action, f"it waits for stage {source_of(action, schedule)} for ever")


RULES: dict[str, Callable[[Schedule], Iterator[Violation]]] = {
    "a stage lives on one rank": _placement,
    "every action once": _once,
    "forward, input, weights": _order,
    "micro-batch order": _microbatch_order,
    "progress": _progress,
}
