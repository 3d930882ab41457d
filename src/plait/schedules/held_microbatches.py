"""What each rank of a schedule holds when its actions start: micro-batches, gradients and receive buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ge, le
from typing import NamedTuple

from plait.schedules.action import Action, Kind
from plait.schedules.lowering.messages import SENDS_IN_FLIGHT
from plait.schedules.schedule import Schedule

Held = tuple[int, ...]
"""For each of a rank's stages, micro-batches before their input gradient; then those between it and `W`."""

MOST_COMPARED = 64
"""Up to so many counts are compared with each other, to leave out smaller ones; of more all are kept."""


class ActionStart(NamedTuple):
    """Key for the starts of a rank's actions of one stage and kind, before or after its first backward."""

    place: int
    """Which of the rank's stages it is, by its number among them."""
    kind: Kind
    after_backward: bool
    """Whether the rank has run a backward before, so that gradients are allocated."""


class HeldCounts(NamedTuple):
    """The most micro-batches, receive buffers and sent gradients that one rank holds during a step."""

    stages: tuple[int, ...]
    starts: Mapping[ActionStart, tuple[Held, ...]]
    """The largest counts with which actions start; a forward counts its own micro-batch. Left out are those
    before a backward that are not larger than some after one."""
    received: int
    """The most inputs and gradients of other ranks in use, each until the weight gradient."""
    receive_buffers: int
    """Buffers for them, with one of each channel posted ahead."""
    sending: int
    """Gradients that are being sent, after the first backwards."""

    def covers(self, other: HeldCounts) -> bool:
        """Return whether every count is at least that of `other`, a rank whose stages have equal layers."""
        return all(map(ge, self[2:], other[2:])) and all(
            _covered(held, self.starts.get(start, ()))
            for start, most in other.starts.items()
            for held in most
        )


@dataclass(frozen=True)
class HeldMicrobatches:
    """Counts the micro-batches that each rank of a schedule holds when its actions start."""

    schedule: Schedule

    @cached_property
    def ranks(self) -> tuple[HeldCounts, ...]:
        """For each rank the most micro-batches, buffers and sent gradients that it holds."""
        return tuple(_rank_held(self.schedule, rank) for rank in range(self.schedule.ranks))

    def largest(self, alike: Sequence[object]) -> list[HeldCounts]:
        """Return the counts of the ranks that may need most memory: no rank with equal stages holds more.

        `alike`: for each rank a value that is equal for ranks with equal stages.
        """
        found: dict[object, list[HeldCounts]] = {}
        for key, rank in zip(alike, self.ranks, strict=True):
            others = found.setdefault(key, [])
            if not any(other.covers(rank) for other in others):
                others[:] = [*(other for other in others if not rank.covers(other)), rank]
        return [rank for ranks in found.values() for rank in ranks]


def _rank_held(schedule: Schedule, rank: int) -> HeldCounts:
    stages = schedule.stages_of(rank)
    first, later = _seen(schedule.actions[rank], stages)
    starts: dict[ActionStart, tuple[Held, ...]] = {}
    for (place, kind), counts in later.items():
        starts[ActionStart(place, kind, True)] = _largest(counts)
    for (place, kind), counts in first.items():
        most = _largest(counts) if counts else ()
        larger = tuple(
            one for one in most if not _covered(one, starts.get(ActionStart(place, kind, True), ()))
        )
        if larger:
            starts[ActionStart(place, kind, False)] = larger
    in_use = _most_received(schedule, rank, starts)
    peers = {schedule.rank_of[stage - 1] for stage in stages if schedule.exchanges_before(stage)}
    buffers = sum(min(used + 1, _messages(schedule, rank, channel)) for channel, used in in_use.items())
    sending = len(peers) * min(SENDS_IN_FLIGHT, schedule.microbatches)
    return HeldCounts(stages, starts, in_use.total(), buffers, sending)


_Channel = tuple[int, Kind]
"""The rank that sends; `F` for inputs, `I` for gradients."""
_Seen = dict[tuple[int, Kind], set[Held]]
"""The counts with which actions start, by stage and kind."""


def _seen(actions: Sequence[Action], stages: Sequence[int]) -> tuple[_Seen, _Seen]:
    """Return how many micro-batches are held when actions start: until the first backward, and after it."""
    place, width = {stage: number for number, stage in enumerate(stages)}, len(stages)
    before: _Seen = {(number, kind): set() for number in range(width) for kind in Kind}
    after: _Seen = {key: set() for key in before}
    held, seen = [0] * (2 * width), before
    for stage, kind, _ in actions:
        here = place[stage]
        if kind is Kind.F:
            held[here] += 1
            seen[here, kind].add((*held,))
            continue
        seen[here, kind].add((*held,))
        seen = after
        if kind is Kind.W:
            held[width + here] -= 1
        else:
            held[here] -= 1
            held[width + here] += kind is Kind.I
    used = {key for key in before if before[key] or after[key]}
    return {key: before[key] for key in used}, {key: after[key] for key in used if after[key]}


def _most_received(
    schedule: Schedule, rank: int, starts: Mapping[ActionStart, Sequence[Held]]
) -> Counter[_Channel]:
    """Return how many received tensors are in use, by channel, when most are."""
    stages = schedule.stages_of(rank)
    sources = [_sources(schedule, stage) for stage in stages]
    inputs = [sum(kind is Kind.F for _, kind in one) for one in sources]
    gradients = [len(one) - count for one, count in zip(sources, inputs, strict=True)]
    weights = [*inputs, *map(len, sources)]

    def used(start: ActionStart, held: Held) -> int:
        own = gradients[start.place] if start.kind in (Kind.I, Kind.B) else 0
        return own + sum(count * times for count, times in zip(held, weights, strict=True))

    start, held = max(
        ((start, held) for start, most in starts.items() for held in most), key=lambda one: used(*one)
    )
    found = Counter[_Channel]()
    for place, stage_sources in enumerate(sources):
        unfinished, later = held[place], held[len(stages) + place]
        own = place == start.place and start.kind in (Kind.I, Kind.B)
        for channel in stage_sources:
            found[channel] += later + (unfinished if channel[1] is Kind.F else own)
    return found


def _messages(schedule: Schedule, rank: int, channel: _Channel) -> int:
    """Return how many messages a rank receives on a channel."""
    users = sum(channel in _sources(schedule, stage) for stage in schedule.stages_of(rank))
    return users * schedule.microbatches


def _sources(schedule: Schedule, stage: int) -> list[_Channel]:
    """Return the other ranks that send a stage inputs and gradients."""
    found = []
    if schedule.exchanges_before(stage):
        found.append((schedule.rank_of[stage - 1], Kind.F))
    if stage + 1 < schedule.stages and schedule.exchanges_before(stage + 1):
        found.append((schedule.rank_of[stage + 1], Kind.I))
    return found


def _covered(one: Held, others: Iterable[Held]) -> bool:
    """Return whether each count is at most that of one and the same of `others`."""
    return any(all(map(le, one, other)) for other in others)


def _largest(seen: set[Held]) -> tuple[Held, ...]:
    """Return the counts that are not smaller than others in `seen`, or some more."""
    for axis in range(len(next(iter(seen)))):
        if len(seen) == 1:
            break
        largest: dict[Held, int] = {}  # of those that differ here only, the largest: leaves few to compare
        for one in seen:
            rest = one[:axis] + one[axis + 1 :]
            largest[rest] = max(one[axis], largest.get(rest, 0))
        seen = {(*rest[:axis], count, *rest[axis:]) for rest, count in largest.items()}
    if len(seen) > MOST_COMPARED:
        return tuple(sorted(seen, reverse=True))
    most: list[Held] = []
    for one in sorted(seen, key=lambda held: (sum(held), held), reverse=True):
        if not _covered(one, most):
            most.append(one)
    return tuple(most)
