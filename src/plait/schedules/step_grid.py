"""The rank × step grid: every action takes one step and runs as early as possible.

rank 0  0F0 0F1  .   .  0B0  .  0B1
rank 1   .  1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import ActionRows, Timing, simulate_events

GridCell: TypeAlias = tuple[int, int]
"""A rank, and the position of one of its actions."""

_AROUND = 6
"""Steps shown on either side of a cell."""


@dataclass(frozen=True)
class Grid:
    """The time step of each action that can run, per rank; the remaining actions are in a deadlock."""

    steps: tuple[tuple[int, ...], ...]
    missing: Mapping[int, Action]
    """For each rank in the deadlock, the action that it waits for."""

    def step(self, cell: GridCell) -> int:
        """Return the time step of an action; for one in a deadlock, count on from the rank's last step."""
        rank, position = cell
        steps = self.steps[rank]
        if position < len(steps):
            return steps[position]
        return (steps[-1] + 1 if steps else 0) + position - len(steps)


def fill_grid(rows: ActionRows, stages: int) -> Grid:
    """Return the time steps of actions; a row ends before its first action on a stage that does not exist."""
    ones, zeros = (1,) * stages, (0,) * stages
    known = [list(takewhile(lambda action: 0 <= action.stage < stages, row)) for row in rows]
    ends, missing = simulate_events(known, Timing(dict.fromkeys(Kind, ones), zeros, zeros))
    return Grid(tuple(tuple(end - 1 for end in row) for row in ends), missing)


def draw_grid(
    rows: ActionRows, grid: Grid, around: GridCell | None = None, mark: Action | None = None
) -> str:
    """Return the grid as text, a line per rank: all steps or those around a cell; `mark` is in brackets."""
    cells = {
        (rank, grid.step((rank, position))): f"[{action}]" if action == mark else str(action)
        for rank, row in enumerate(rows)
        for position, action in enumerate(row)
    }
    first, last = 0, max((step for _, step in cells), default=0)
    if around is not None:
        middle = grid.step(around)
        first, last = max(middle - _AROUND, first), min(middle + _AROUND, last)
    before, after = ("… " if first else ""), (" …" if any(step > last for _, step in cells) else "")
    width = max((len(text) for text in cells.values()), default=0)
    margin = len(f"rank {len(rows) - 1}")
    lines = []
    for rank in range(len(rows)):
        shown = (cells.get((rank, step), ".").center(width) for step in range(first, last + 1))
        lines.append(f"{f'rank {rank}':<{margin}}  {before}{' '.join(shown)}{after}".rstrip())
    return "\n".join(lines)
