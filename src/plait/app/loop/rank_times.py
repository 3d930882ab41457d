"""`RankTimes`: how long each rank computes in a step, as medians over a few steps, gathered on all ranks.

Of two middle times the lower one counts: disturbances only make steps longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TypeAlias

import torch
from torch import Tensor

from plait.engine.action_times import ActionSeconds
from plait.engine.engine import Engine
from plait.ranks.accelerator import read_later, sent
from plait.ranks.collectives import all_gather
from plait.schedules.action import Kind

OwnTimes: TypeAlias = Mapping[tuple[int, Kind], float]
"""By stage and kind: the seconds for which a rank computed such actions in a step."""


@dataclass(frozen=True)
class WindowTimes:
    """How many seconds a step each rank computes, as medians over a few consecutive steps (a window)."""

    own: Sequence[OwnTimes]
    """Without waits for other ranks, and for a core of the host."""
    optimizer: Sequence[float]
    elapsed: Sequence[float]
    """All actions, with waits for a core."""
    step: float
    """A whole step, the longest of all ranks."""

    @property
    def actions(self) -> list[float]:
        """The seconds that each rank's actions take in a step, without its optimizer."""
        return [sum(own.values()) for own in self.own]

    def of_kind(self, rank: int, kind: Kind) -> float:
        """Return the seconds a step that `rank` spends in actions of one kind: F, I, W or B."""
        return sum(seconds for (_, one), seconds in self.own[rank].items() if one is kind)


class RankTimes:
    """Measures an engine's steps on this rank, and gathers the medians of a few steps over the world."""

    def __init__(self, engine: Engine, every: int) -> None:
        """`every`: the number of steps over which medians are taken (a window)."""
        self._engine, self._every = engine, every
        self._times = engine.time_actions()
        self._unread: deque[Callable[[], ActionSeconds]] = deque()
        self._window: list[tuple[ActionSeconds, float]] = []

    def end_step(self) -> None:
        """Mark the end of a step whose work was submitted to the device, perhaps not done yet."""
        self._unread.append(self._times.take())

    def read_step(self, seconds: float) -> bool:
        """Read the times of the oldest unread step, which is done; return whether it ends a window of steps.

        `seconds`: what the whole step took.
        """
        if not self._unread:
            return False
        self._window.append((self._unread.popleft()(), seconds))
        return len(self._window) == self._every

    def gather(self) -> Callable[[], WindowTimes]:
        """Start to gather a window's medians; return a function that returns those of all ranks.

        Communication: an all-gather over `world` of 8 bytes for each kind of action of the rank's stages, and
        of 24 bytes more.
        """
        own = [median_low(each) for each in zip(*(times.own for times, _ in self._window), strict=True)]
        elapsed = median_low(times.elapsed for times, _ in self._window)
        step = median_low(seconds for _, seconds in self._window)
        self._window = []
        mesh = self._engine.mesh
        numbers = sent(torch.tensor([*own, elapsed, step], dtype=torch.float64), mesh.device)
        gathered = all_gather(numbers, mesh.group("world"), checked=False)
        read = read_later(gathered.about("for how long ranks computed").wait())
        return lambda: self._window_times(read())

    def _window_times(self, numbers: Tensor) -> WindowTimes:
        mesh, schedule = self._engine.mesh, self._engine.schedule
        rows = numbers.view(mesh.world, -1).tolist()
        own = []
        for rank, row in enumerate(rows):
            stages = schedule.stages_of(mesh.coordinate_of(rank)["pp"])
            keys = [(stage, kind) for stage in stages for kind in Kind]
            own.append(dict(zip(keys, row[:-3], strict=True)))
        optimizer, elapsed, step = zip(*(row[-3:] for row in rows), strict=True)
        return WindowTimes(own, optimizer, elapsed, max(step))
