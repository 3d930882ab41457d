"""How many micro-batches each rank of a schedule holds at once, for the memory of many models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule

Held = tuple[int, ...]
"""For each of a rank's stages, micro-batches before their input gradient; then those between it and `W`."""

MOST_COMPARED = 64
"""Counts that are compared with each other, to leave out the smaller ones; more are all kept."""


@dataclass(frozen=True)
class HeldMicrobatches:
    """What the ranks of a schedule hold at their peaks, whatever a micro-batch takes on each stage."""

    schedule: Schedule

    @cached_property
    def peaks(self) -> tuple[tuple[Held, ...], ...]:
        """Per rank, the counts of held micro-batches at which its memory may peak, whatever stages take."""
        stages = map(self.schedule.stages_of, range(self.schedule.ranks))
        return tuple(map(_most_held, self.schedule.actions, stages))

    def peak_memory(self, until_input: Sequence[int], until_weight: Sequence[int]) -> tuple[int, ...]:
        """Return each rank's peak, as `peak_memory` does, from what a micro-batch takes on stages."""
        found = []
        for rank, peaks in enumerate(self.peaks):
            own = self.schedule.stages_of(rank)
            sizes = [*(until_input[stage] for stage in own), *(until_weight[stage] for stage in own)]
            found.append(max(sum(map(mul, held, sizes)) for held in peaks))
        return tuple(found)


def _most_held(actions: Sequence[Action], stages: Sequence[int]) -> tuple[Held, ...]:
    place = {stage: number for number, stage in enumerate(stages)}
    held, seen = [0] * (2 * len(stages)), set[Held]()
    for stage, kind, _ in actions:
        first, second = place[stage], place[stage] + len(stages)
        if kind is Kind.F:
            held[first] += 1
        elif kind is not Kind.W:
            held[first] -= 1
            held[second] += 1
        seen.add(tuple(held))
        if kind in (Kind.W, Kind.B):
            held[second] -= 1
    for axis in range(2 * len(stages)):  # of those that differ here only, the largest: leaves few to compare
        largest: dict[Held, int] = {}
        for one in seen:
            rest = one[:axis] + one[axis + 1 :]
            largest[rest] = max(one[axis], largest.get(rest, 0))
        seen = {(*rest[:axis], count, *rest[axis:]) for rest, count in largest.items()}
    if len(seen) > MOST_COMPARED:
        return tuple(sorted(seen, reverse=True))
    most: list[Held] = []
    for one in sorted(seen, key=lambda held: (sum(held), held), reverse=True):
        if not any(all(map(int.__le__, one, other)) for other in most):
            most.append(one)
    return tuple(most)
