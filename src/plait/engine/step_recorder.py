"""Recording of a training step: when each forward and backward starts and ends, on all ranks of `pp`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from plait.engine.pipeline.executor import AroundSegment
from plait.errors import DataError, ScheduleError
from plait.pictures.timelines.timeline import Timeline
from plait.ranks.accelerator import StreamEvent, is_accelerator, synchronize
from plait.ranks.clock_offset import clock_offset
from plait.ranks.collectives import all_gather
from plait.ranks.mesh import Mesh
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.lowering.messages import sends_and_receives
from plait.schedules.lowering.program import Segment
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import Cell

_KINDS = tuple(Kind)
_NEVER = -1
TICK = Fraction(1, 1_000_000)
"""A nanosecond, in milliseconds."""


class MeasuredAction(NamedTuple):
    """A measured action of one rank. Times are nanoseconds of a clock common to all ranks."""

    action: Action
    start: int
    end: int
    wait_start: int | None = None
    """Start of the wait for the action's message; None: its input is not from another rank."""


MeasuredRows: TypeAlias = Sequence[Sequence[MeasuredAction]]
"""Per rank of `pp`, its measured actions, in order."""


class HostClock:
    """Clock for computations on the CPU, which are complete when the call that starts them returns."""

    def stamp(self) -> int:
        """Return the time in nanoseconds of `time.perf_counter_ns`."""
        return time.perf_counter_ns()

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Return the stamps, which are nanoseconds already."""
        return list(stamps)


class DeviceClock:
    """Clock for computations on a GPU: a time stamp is an event on its current stream.

    Making a clock synchronises with the device, and so does `read`; `stamp` does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        before = time.perf_counter_ns()
        self._base = self.stamp()
        self._base.wait()
        self._origin = (before + time.perf_counter_ns()) // 2
        """When the base event was recorded, on the host's clock, to a few microseconds."""

    def stamp(self) -> StreamEvent:
        """Record an event after all work submitted to the GPU's stream so far, and return it."""
        return StreamEvent(self._device, timed=True)

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Return the stamps as nanoseconds of the host's clock, with a resolution of half a microsecond."""
        synchronize(self._device)
        return [self._origin + round(event.milliseconds_since(self._base) * 1_000_000) for event in stamps]


Clock: TypeAlias = HostClock | DeviceClock


def clock_on(device: torch.device) -> Clock:
    """Start a clock for computations on `device`."""
    return DeviceClock(device) if is_accelerator(device) else HostClock()


class Recorder:
    """Records start and end of each segment (consecutive instructions) of the training steps of a rank."""

    def __init__(self, start_clock: Callable[[], Clock]) -> None:
        """`start_clock` returns a new clock; it is called at the start of each step."""
        self._start_clock = start_clock
        self.step: Callable[[], tuple[MeasuredAction, ...]] | None = None
        """Returns the actions of the last training step that ended; waits for the device on a GPU."""

    @contextmanager
    def recording_step(self) -> Iterator[AroundSegment]:
        """Context of one step; yields a function that returns a context to time a segment's instructions.

        A step that fails is not recorded.
        """
        clock, notes = self._start_clock(), list[tuple[Segment, Any, Any]]()

        @contextmanager
        def recorded(segment: Segment) -> Iterator[None]:
            start = clock.stamp()
            yield
            notes.append((segment, start, clock.stamp()))

        yield lambda segment: recorded(segment) if segment.computes or segment.awaits else nullcontext()
        self.step = partial(_row, clock, notes)


class Recording:
    """Measured times, in milliseconds, of the last training step within the context `Engine.recording`.

    An action lasts from its first layer's start to its last layer's end (on a GPU: on the stream where it
    computes), with the loss and the gradient that it starts from; waiting for messages and sending is not in
    it. Collectives of `tp` are, and waiting for parameters. All ranks of `pp` call the methods, and get the
    same results. Ranks that differ in `dp` or `tp` have timelines of their own.
    Communication: two all-gathers over `pp` by the first method that is called, and where `pp` spans several
    hosts some messages to compare their clocks.
    """

    def __init__(self, mesh: Mesh, schedule: Callable[[], Schedule]) -> None:
        """`schedule` returns the engine's current schedule."""
        self._mesh = mesh
        self._schedule = schedule
        self.recorder = Recorder(partial(clock_on, mesh.device))
        self._collected: tuple[object, tuple[tuple[MeasuredAction, ...], ...]] | None = None

    def actions(self) -> tuple[MeasuredAction, ...]:
        """Return this rank's actions, in nanoseconds of its `time.perf_counter_ns`, without communication.

        Raises DataError where no training step was recorded.
        """
        if self.recorder.step is None:
            raise DataError(
                "nothing was recorded: call forward_backward inside of `with engine.recording() as …`."
            )
        return self.recorder.step()

    def timeline(self) -> Timeline:
        """Return the step as a timeline that starts at 0, like those of `plait.simulate`.

        Its schedule has the actions as they ran: a `B` whose result is sent is an `I` and a `W`. Its `hop` is
        the shortest time in which a message arrived. Memory is counted as in a simulation. Raises DataError
        where no training step was recorded.
        """
        return measured_timeline(self._schedule(), self._rows())

    def costs(self) -> Costs:
        """Return the median times of a message and of each stage's forward, input and weight gradients.

        `plait.simulate(recording.timeline().schedule, recording.costs())` simulates the step with them.
        `I` and `W` that ran as one `B` cost half each. A message counts where its receiver was waiting when
        it was sent; `comm` is 0 where no rank ever waited. Memory is not measured. Raises DataError as
        `timeline`.
        """
        return measured_costs(self._schedule(), self._rows())

    def waits(self) -> tuple[float, ...]:
        """Return the milliseconds that each rank of `pp` waited for messages in the recorded step."""
        return measured_waits(self._rows())

    def _rows(self) -> tuple[tuple[MeasuredAction, ...], ...]:
        step, own = self.recorder.step, self.actions()
        if self._collected is None or self._collected[0] is not step:
            self._collected = step, _gathered(own, self._mesh)
        return self._collected[1]


def _row(clock: Clock, notes: Sequence[tuple[Segment, Any, Any]]) -> tuple[MeasuredAction, ...]:
    """Return this rank's actions with their times, in order, from the clock's stamps around each segment.

    An action lasts from its first segment's start to its last one's end: what runs in between counts as part
    of it, such as waiting for parameters. The gradient that a backward starts from is a segment of an `I`,
    also where the action is a `B`.
    """
    segments, starts, ends = zip(*notes, strict=True)
    row: list[MeasuredAction] = []
    asked: dict[Action, int] = {}
    for segment, start, end in zip(segments, clock.read(starts), clock.read(ends), strict=True):
        action = segment.computes
        if segment.awaits is not None:
            asked[segment.awaits] = start
        elif action is None:
            continue
        elif row and row[-1].action in (action, action.message_key):
            row[-1] = row[-1]._replace(action=action, end=end)
        else:
            row.append(MeasuredAction(action, start, end, asked.pop(action.message_key, None)))
    return tuple(row)


def _gathered(row: tuple[MeasuredAction, ...], mesh: Mesh) -> tuple[tuple[MeasuredAction, ...], ...]:
    """All-gather the measured actions of the ranks of `pp`, in nanoseconds of the first rank's clock."""
    group = mesh.group("pp")
    if group.size == 1:
        return (row,)
    place = group.device_for_text(mesh.device)
    offset = clock_offset(group, mesh.device).nanoseconds
    mine = torch.tensor([_encoded(done, offset) for done in row], dtype=torch.int64, device=place)
    counts = all_gather(torch.tensor([len(row)], dtype=torch.int64, device=place), group).wait().tolist()
    padded = torch.zeros((max(counts), 6), dtype=torch.int64, device=place)
    padded[: len(row)] = mine.reshape(-1, 6)
    everyone = all_gather(padded, group).wait().view(group.size, -1, 6).cpu()
    return tuple(tuple(map(_decoded, rows[:count])) for rows, count in zip(everyone, counts, strict=True))


def _encoded(done: MeasuredAction, offset: int) -> tuple[int, ...]:
    stage, kind, microbatch = done.action
    asked = _NEVER if done.wait_start is None else done.wait_start + offset
    return stage, _KINDS.index(kind), microbatch, done.start + offset, done.end + offset, asked


def _decoded(numbers: Tensor) -> MeasuredAction:
    stage, kind, microbatch, start, end, asked = map(int, numbers)
    return MeasuredAction(
        Action(stage, _KINDS[kind], microbatch), start, end, None if asked == _NEVER else asked
    )


def measured_timeline(schedule: Schedule, rows: MeasuredRows) -> Timeline:
    """Return the measured actions of all ranks, `rows`, as a timeline that starts at 0."""
    first = min((row[0].start for row in rows if row), default=0)
    actions = tuple(tuple(done.action for done in row) for row in rows)
    ran = replace(schedule, actions=actions, bound=None)
    cells = tuple(
        tuple(Cell(done.action, done.start - first, done.end - first) for done in row) for row in rows
    )
    hops = [consumer.start - producer.end for producer, consumer in sends_and_receives(rows, ran)]
    return Timeline(
        ran, TICK, cells, Costs().memory(ran.ranks, ran.stages), max(0, min(hops, default=0)), unit="ms"
    )


def measured_costs(schedule: Schedule, rows: MeasuredRows) -> Costs:
    """Return the median times of each stage's forwards and gradients, and of messages."""
    durations: dict[tuple[int, Kind], list[int]] = {}
    for done in (done for row in rows for done in row):
        durations.setdefault((done.action.stage, done.action.kind), []).append(done.end - done.start)

    def cost(stage: int, kind: Kind) -> float:
        alone, both = durations.get((stage, kind)), durations.get((stage, Kind.B))
        if alone is None and (both is None or kind is Kind.F):
            raise ScheduleError(f"no {kind} of stage {stage} was measured: record a whole training step.")
        return _milliseconds(median(alone)) if alone else _milliseconds(median(both or ())) / 2

    stages = range(schedule.stages)
    hops = [
        max(0, consumer.start - producer.end)
        for producer, consumer in sends_and_receives(rows, schedule)
        if consumer.wait_start is not None and consumer.wait_start < producer.end
    ]
    forward, inputs, weights = ([cost(stage, kind) for stage in stages] for kind in (Kind.F, Kind.I, Kind.W))
    return Costs(F=forward, I=inputs, W=weights, comm=_milliseconds(median(hops)) if hops else 0)


def measured_waits(rows: MeasuredRows) -> tuple[float, ...]:
    """Return the time that each rank waited for messages, in milliseconds."""
    return tuple(
        _milliseconds(sum(done.start - done.wait_start for done in row if done.wait_start is not None))
        for row in rows
    )


def _milliseconds(nanoseconds: float) -> float:
    return nanoseconds / 1_000_000
