"""What really happened in a training step, on all ranks of `pp`: a timeline and costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from plait.comm.clocks import clock_offset
from plait.comm.collectives import all_gather
from plait.comm.mesh import Mesh
from plait.engine.clock import clock_on
from plait.engine.recorder import Recorder
from plait.errors import DataError
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.measured import (
    MeasuredAction,
    measured_costs,
    measured_timeline,
    measured_waits,
)
from plait.schedules.simulation.timeline import Timeline

_KINDS = tuple(Kind)
_NEVER = -1


class Recording:
    """The last training step that was run inside of `Engine.recording`. Times are milliseconds.

    An action lasts from its first layer's start to its last layer's end (on a GPU: on the stream where it
    computes), with the loss and the gradient that it starts from; waiting for messages and sending is not in
    it. Collectives of `tp` are, and waiting for parameters. The methods are for all ranks of `pp`; each gets
    the same. Ranks that differ in `dp` or `tp` have timelines of their own.
    Communication: two all-gathers over `pp` by the method that is called first, and where `pp` goes over
    several hosts some messages to compare their clocks.
    """

    def __init__(self, mesh: Mesh, schedule: Callable[[], Schedule]) -> None:
        """`schedule` gives the order of the steps as it is then."""
        self._mesh = mesh
        self._schedule = schedule
        self.recorder = Recorder(partial(clock_on, mesh.device))
        self._collected: tuple[object, tuple[tuple[MeasuredAction, ...], ...]] | None = None

    def timeline(self) -> Timeline:
        """The step in the form of a simulated one; it starts at 0. All pictures take it.

        Its schedule has the actions as they were done: a `B` whose result is sent is an `I` and a `W`.
        DataError where no training step was recorded.
        """
        return measured_timeline(self._schedule(), self._rows())

    def costs(self) -> Costs:
        """What `F`, `I` and `W` of each stage took, medians over micro-batches, and a hop between ranks.

        `plait.simulate(recording.timeline().schedule, recording.costs())` is what the simulator makes of it.
        `I` and `W` that were done at once cost half each. DataError as `timeline`.
        """
        return measured_costs(self._schedule(), self._rows())

    def waits(self) -> tuple[float, ...]:
        """How long each rank of `pp` waited for results of others. DataError as `timeline`."""
        return measured_waits(self._rows())

    def _rows(self) -> tuple[tuple[MeasuredAction, ...], ...]:
        step = self.recorder.step
        if step is None:
            raise DataError(
                "nothing was recorded: call forward_backward inside of `with engine.recording() as …`."
            )
        if self._collected is None or self._collected[0] is not step:
            self._collected = step, _gathered(step.row(), self._mesh)
        return self._collected[1]


def _gathered(row: tuple[MeasuredAction, ...], mesh: Mesh) -> tuple[tuple[MeasuredAction, ...], ...]:
    """The rows of all ranks of `pp`, in the time of the first one's host."""
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
    asked = _NEVER if done.asked is None else done.asked + offset
    return stage, _KINDS.index(kind), microbatch, done.start + offset, done.end + offset, asked


def _decoded(numbers: Tensor) -> MeasuredAction:
    stage, kind, microbatch, start, end, asked = map(int, numbers)
    return MeasuredAction(
        Action(stage, _KINDS[kind], microbatch), start, end, None if asked == _NEVER else asked
    )
