"""The rank × step grid: every action takes one step, and runs as soon as all that it needs is done.

rank 0  0F0 0F1  .   .  0B0  .  0B1
rank 1   .  1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from plait.schedules.action import Action, Kind
from plait.schedules.play import Pace, Rows, play

Cell: TypeAlias = tuple[int, int]
"""A rank, and which of its actions."""

_AROUND = 6
"""Steps shown on either side of a cell."""


@dataclass(frozen=True)
class Grid:
    """Per rank, the step of each action that gets to run; the others wait for ever."""

    steps: tuple[tuple[int, ...], ...]
    missing: Mapping[int, Action]
    """Of each rank that is stuck: what it waits for."""

    def step(self, cell: Cell) -> int:
        """The step of an action; of one that never runs, the step at which its turn would come."""
        rank, position = cell
        steps = self.steps[rank]
        if position < len(steps):
            return steps[position]
        return (steps[-1] + 1 if steps else 0) + position - len(steps)


def fill(rows: Rows, stages: int) -> Grid:
    """The grid of `rows`, over a pipeline of so many stages. Each row up to an action of no such stage."""
    ones, zeros = (1,) * stages, (0,) * stages
    known = [list(takewhile(lambda action: 0 <= action.stage < stages, row)) for row in rows]
    ends, missing = play(known, Pace(dict.fromkeys(Kind, ones), zeros, zeros))
    return Grid(tuple(tuple(end - 1 for end in row) for row in ends), missing)


def draw(rows: Rows, grid: Grid, around: Cell | None = None, mark: Action | None = None) -> str:
    """The grid as text, a line per rank: all of it, or the steps around a cell. `mark` stands in brackets."""
    cells = {
        (rank, grid.step((rank, position))): f"[{action}]" if action == mark else str(action)
        for rank, row in enumerate(rows)
        for position, action in enumerate(row)
    }
    first, last = 0, max((step for _, step in cells), default=0)
    if around is not None:
        middle = grid.step(around)
        first, last = max(middle - _AROUND, first), min(middle + _AROUND, last)
    before, behind = ("… " if first else ""), (" …" if any(step > last for _, step in cells) else "")
    width = max((len(text) for text in cells.values()), default=0)
    margin = len(f"rank {len(rows) - 1}")
    lines = []
    for rank in range(len(rows)):
        shown = (cells.get((rank, step), ".").center(width) for step in range(first, last + 1))
        lines.append(f"{f'rank {rank}':<{margin}}  {before}{' '.join(shown)}{behind}".rstrip())
    return "\n".join(lines)
