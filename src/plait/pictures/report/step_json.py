"""`step.json`: a recorded step of all ranks, with its timeline, each rank's time by use, and traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from plait.files import adapter_of, write_bytes
from plait.pictures.report.run_json import Count, read_json_file
from plait.pictures.timelines.html import TimeAxis, TimelineRow, timeline_data
from plait.schedules.action import Action, Kind
from plait.schedules.timed_schedule import Cell

STEP_FILE = "step.json"

RecordedAction = tuple[Count, Annotated[str, Field(pattern="^[FIWB]$")], Count, Count, Count]
"""Stage, kind, micro-batch, start and end in nanoseconds of the clock of rank 0."""
BlockedSpan = tuple[str, Count, Count]
"""The axis, start and end in nanoseconds of a wait for communication."""
MOST_ROWS = 64
"""Ranks whose timeline is shown: of more, those of the first pipelines."""
_MILLISECOND = Fraction(1, 1_000_000)
"""Of a nanosecond."""
_WAITS = {"pp": "pp", "tp": "tp", "cp": "cp", "ep_etp": "ep", "tie": "tied parameters"} | dict.fromkeys(
    (
        *("dp", "replicate", "shard", "dp_cp", "shard_cp", "edp", "replicate_edp"),
        *("replicate_etp", "replicate_edp_etp"),
    ),
    "dp",
)
"""Names under which waits along an axis are shown; along any other, such as the world, it is `_OTHER`."""
_OTHER = "other ranks"
_COLOURS = {axis: f"axis-{axis}" for axis in ("pp", "tp", "cp", "ep", "dp")} | {
    "tied parameters": "axis-tie",
    _OTHER: "axis-all",
}


@dataclass(frozen=True)
class RecordedRank:
    """What one rank did in a recorded step: its actions, waits and traffic."""

    actions: tuple[RecordedAction, ...]
    blocked: tuple[BlockedSpan, ...]
    traffic: Mapping[str, Mapping[str, tuple[Count, Count]]]
    """Calls and payload bytes of each kind of operation, by axis."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step of all ranks: the content of `step.json`."""

    step: Count
    """Counted from 1."""
    policy: str
    microbatches: Count
    stage_ranks: tuple[Count, ...]
    ranks: tuple[RecordedRank, ...]
    """All ranks of the world, in order."""

    @cached_property
    def pipelines(self) -> int:
        """Number of parallel pipelines: how many ranks run the same stage."""
        return max(1, len(self.ranks) // (max(self.stage_ranks) + 1))

    @cached_property
    def shown_ranks(self) -> list[int]:
        """The ranks that the timeline shows, pipeline by pipeline."""
        ranks, each = len(self.ranks), len(self.ranks) // self.pipelines
        count = max(1, min(self.pipelines, MOST_ROWS // max(each, 1)))
        return [rank for pipeline in range(count) for rank in range(pipeline, ranks, self.pipelines)]

    @cached_property
    def axes(self) -> list[tuple[str, str]]:
        """Name and colour of the mesh axes along which some rank waits."""
        found = {_shown_axis(axis) for rank in self.ranks for axis, _, _ in rank.blocked}
        return [(name, colour) for name, colour in _COLOURS.items() if name in found]

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of action that occur."""
        found = {kind for rank in self.ranks for _, kind, *_ in rank.actions}
        return [kind for kind in Kind if str(kind) in found]

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The first start and the last end of an action or a wait, in nanoseconds."""
        spans = [(start, end) for rank in self.ranks for *_, start, end in rank.actions]
        spans += [(start, end) for rank in self.ranks for _, start, end in rank.blocked]
        return min((start for start, _ in spans), default=0), max((end for _, end in spans), default=0)

    def timeline(self) -> dict[str, object]:
        """Return the data for the page's JavaScript function `drawTimeline`."""
        first, last = self.bounds
        axis = TimeAxis(first, last - first, _MILLISECOND, "ms")
        rows = [self._row(rank) for rank in self.shown_ranks]
        return timeline_data(
            rows, axis, microbatches=self.microbatches, stage_ranks=self.stage_ranks, axes=self.axes
        )

    def uses(self) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield each rank with its seconds by use: computing, blocked along each axis, and the rest."""
        first, last = self.bounds
        for number, rank in enumerate(self.ranks):
            blocked = Counter({name: 0 for name, _ in self.axes})
            inside = 0
            for axis, start, end in rank.blocked:
                blocked[_shown_axis(axis)] += end - start
                inside += sum(max(0, min(end, done) - max(start, begin)) for *_, begin, done in rank.actions)
            computing = sum(end - start for *_, start, end in rank.actions) - inside
            rest = max(0, last - first - computing - blocked.total())
            uses = {"computing": computing, **blocked, "other": rest}
            yield number, {name: nanoseconds / 1e9 for name, nanoseconds in uses.items()}

    def traffic(self) -> Iterator[tuple[str, str, int, int, int]]:
        """Yield axis, operation, the most calls and the most bytes of a rank, and the bytes of all ranks."""
        totals: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for rank in self.ranks:
            for axis, kinds in rank.traffic.items():
                for kind, count in kinds.items():
                    totals.setdefault((axis, kind), []).append(count)
        for (axis, kind), counts in sorted(totals.items(), key=lambda one: -sum(size for _, size in one[1])):
            calls, sizes = zip(*counts, strict=True)
            yield axis, kind, max(calls), max(sizes), sum(sizes)

    def _row(self, rank: int) -> TimelineRow:
        own = self.ranks[rank]
        cells = [
            Cell(Action(stage, Kind(kind), batch), start, end)
            for stage, kind, batch, start, end in own.actions
        ]
        names = [name for name, _ in self.axes]
        blocked = [(names.index(_shown_axis(axis)), start, end) for axis, start, end in in_order(own)]
        return TimelineRow(f"rank {rank}", cells, rank % self.pipelines, blocked)


def write_step(step: RecordedStep, folder: Path) -> None:
    """Write `step.json` in `folder`. Raises `OSError`."""
    write_bytes(folder / STEP_FILE, adapter_of(RecordedStep).dump_json(step))


def read_step(folder: Path) -> RecordedStep | None:
    """Return the content of `step.json`, or None without the file. Raises `DataError` if damaged."""
    return read_json_file(RecordedStep, folder / STEP_FILE, _contradictions)


def _contradictions(step: RecordedStep) -> Iterator[str]:
    """Yield the contradictions between fields of a recorded step, as text."""
    pipeline = max(step.stage_ranks, default=-1) + 1
    if not step.ranks or not pipeline or len(step.ranks) % pipeline:
        yield "ranks: they are no whole pipelines of the ranks in stage_ranks"
    for number, rank in enumerate(step.ranks):
        if any(stage >= len(step.stage_ranks) or start > end for stage, _, _, start, end in rank.actions):
            yield f"ranks.{number}.actions: one is of no stage, or ends before it starts"
        if any(start > end for _, start, end in rank.blocked):
            yield f"ranks.{number}.blocked: a wait ends before it starts"


def in_order(rank: RecordedRank) -> Sequence[BlockedSpan]:
    """Return the waits of a rank in the order of their start, without overlaps."""
    spans: list[BlockedSpan] = []
    for axis, start, end in sorted(rank.blocked, key=lambda span: span[1]):
        begin = max(start, spans[-1][2]) if spans else start
        if end > begin:
            spans.append((axis, begin, end))
    return spans


def _shown_axis(axis: str) -> str:
    return _WAITS.get(axis, _OTHER)
