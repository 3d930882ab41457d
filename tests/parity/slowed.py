"""A clock that runs by what a rank computes, so that a slow rank is the same on any machine.

An action lasts as long as its layers cost, times the share of rows, and the rank's factor in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.loop.work_division import work_of
from plait.engine.action_times import ActionTimes
from plait.engine.engine import Engine
from plait.engine.pipeline.executor import Calls, RunCalls
from plait.models.layers.layer_sequence import layer_costs
from plait.schedules.action import Kind
from plait.schedules.lowering.program import RunLayer, Segment

Factor = Callable[[int, int], float]
"""Returns how many times as long a rank takes in a step, counted from 1."""
PARTS = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}
"""Of a layer's cost, in thirds."""


class WorkClock:
    """Seconds that pass only as work is done, and as the rank waits for a core."""

    def __init__(self) -> None:
        self.now = self.own = 0.0

    def stamp(self) -> tuple[float, float]:
        return self.own, self.now

    def seconds(self, start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
        return end[0] - start[0], end[1] - start[1]


def seconds_of(segment: Segment, engine: Engine) -> float:
    """What the layers of a segment cost, in seconds: far more than a step may take on a busy machine."""
    costs, stages = layer_costs(engine.blueprint.sequence.layers), engine.blueprint.stage_layers
    return sum(
        PARTS[one.action.kind] * costs[stages[one.action.stage][one.layer]] / 3e4
        for one in segment.instructions
        if isinstance(one, RunLayer)
    )


class Slowed(Callback):
    """Lets actions last as long as their layers cost, and longer on slow ranks. After `Stragglers`."""

    def __init__(self, factor: Factor, *, waits: bool = False) -> None:
        """`waits`: whether slow ranks wait for a core in the time that they take longer."""
        self.factor, self._waits = factor, waits
        self.seconds: list[float] = []
        """For how long this rank computed in each step."""
        self._clock, self._step = WorkClock(), 0

    def begin(self, run: TrainingLoop) -> None:
        self.replanned(run)

    def replanned(self, run: TrainingLoop) -> None:
        times = run.engine._runner.action_times
        if isinstance(times, ActionTimes):
            times._clock = self._clock  # type: ignore[assignment]
            bind = times.bind

            def bound(segments: Sequence[Segment], runs: Sequence[RunCalls]) -> Sequence[RunCalls]:
                pairs = zip(segments, runs, strict=True)
                return bind(segments, [self._lasting(run, one, segment) for segment, one in pairs])

            times.bind = bound  # type: ignore[method-assign]

    def _lasting(self, run: TrainingLoop, call: RunCalls, segment: Segment) -> RunCalls:
        seconds = seconds_of(segment, run.engine) * work_of(run).shares[run.mesh.index("dp")]

        def lasting(calls: Calls) -> None:
            call(calls)
            factor = self.factor(run.mesh.rank, self._step)
            self._clock.now += seconds * factor
            self._clock.own += seconds * (1 if self._waits else factor)

        return lasting

    def before_step(self, run: TrainingLoop) -> None:
        self._step = run.done + 1
        self._before = self._clock.now

    def after_step(self, run: TrainingLoop) -> None:
        self.seconds.append(self._clock.now - self._before)
