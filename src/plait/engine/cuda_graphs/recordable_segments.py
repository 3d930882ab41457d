"""Which segments of a program can be recorded, and to which stage and micro-batch each belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from plait.schedules.action import Kind
from plait.schedules.lowering.program import RunLayer, Segment

StagePart: TypeAlias = tuple[str, ...]
"""The instructions of a segment, without the micro-batch."""


@dataclass(frozen=True)
class SegmentPlace:
    """Where a computing segment belongs: its stage, micro-batch, and place among the segments of both."""

    name: str
    stage: int
    microbatch: int
    number: int
    kind: Kind
    """`F`, `I` (the loss's gradient too), `W` or `B`."""
    leaves_stage: bool
    """Whether what it computes leaves the stage: it is the micro-batch's last forward, or last backward."""
    parts: tuple[StagePart, ...]
    """Of all segments of the micro-batch at the stage; equal for micro-batches that run alike."""

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch is done at this stage when the segment ends."""
        return self.number + 1 == len(self.parts)


def places_of(segments: Sequence[Segment]) -> list[SegmentPlace | None]:
    """Return the place of each segment of a training program; None for those that do not compute.

    All are None in a program without a backward.
    """
    by_microbatch: dict[tuple[int, int], list[int]] = {}
    for position, segment in enumerate(segments):
        if segment.computes is not None:
            by_microbatch.setdefault((segment.computes.stage, segment.computes.microbatch), []).append(
                position
            )
    places: list[SegmentPlace | None] = [None] * len(segments)
    for (stage, microbatch), positions in by_microbatch.items():
        kinds = [_kind(segments[position]) for position in positions]
        if kinds[-1] is Kind.F:
            continue
        parts = tuple(_part(segments[position]) for position in positions)
        last_forward = max(number for number, kind in enumerate(kinds) if kind is Kind.F)
        last_backward = max(number for number, kind in enumerate(kinds) if kind in (Kind.I, Kind.B))
        for number, position in enumerate(positions):
            leaves_stage = number in (last_forward, last_backward)
            name = segments[position].name
            places[position] = SegmentPlace(
                name, stage, microbatch, number, kinds[number], leaves_stage, parts
            )
    return places


def _kind(segment: Segment) -> Kind:
    assert segment.computes is not None
    return segment.computes.kind


def _part(segment: Segment) -> StagePart:
    return tuple(
        f"{one.action.kind}{one.layer}" if isinstance(one, RunLayer) else type(one).__name__
        for one in segment.instructions
    )
