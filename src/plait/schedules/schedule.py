"""A schedule: the actions of every rank, in order. Plain data to be drawn, checked, lowered and saved.

The rank × step grid shows it: every action takes one step and runs as early as possible.

rank 0  0F0 0F1  .   .  0B0  .  0B1
rank 1   .  1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.event_simulation import ActionRows, EventOrder, Timing, event_order

GridCell: TypeAlias = tuple[int, int]
"""A rank, and the position of one of its actions."""

_AROUND = 6
"""Steps shown on either side of a cell."""


@dataclass(frozen=True)
class Grid:
    """The time step of each rank's actions that can run; in a deadlock, the actions that ranks wait for."""

    steps: tuple[tuple[int, ...], ...]
    missing: Mapping[int, Action]
    """For each rank in the deadlock, the action that it waits for."""

    def step(self, cell: GridCell) -> int:
        """Return the time step of an action; those in a deadlock follow their rank's last one."""
        rank, position = cell
        steps = self.steps[rank]
        if position < len(steps):
            return steps[position]
        return (steps[-1] + 1 if steps else 0) + position - len(steps)


def fill_grid(rows: ActionRows, stages: int) -> Grid:
    """Return when each action of `rows` runs, in steps: each takes one, and starts as early as it can."""
    ones, zeros = (1,) * stages, (0,) * stages
    known = [list(takewhile(lambda action: 0 <= action.stage < stages, row)) for row in rows]
    order = event_order(known, stages)
    ends = order.ends(Timing(dict.fromkeys(Kind, ones), zeros, zeros))
    return Grid(tuple(tuple(end - 1 for end in row) for row in ends), order.missing)


def draw_grid(
    rows: ActionRows, grid: Grid, around: GridCell | None = None, mark: Action | None = None
) -> str:
    """Return the grid as text, a line per rank; `around`: only near a cell, `mark`: a cell in brackets."""
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


class Placement(StrEnum):
    """How the `ranks * chunks` stages, in model order, are assigned to ranks.

    ranks 0 1 2 3, two chunks a rank

    linear  0 1 2 3            one chunk only
    loop    0 1 2 3            and round again: the last stage on the last rank
            4 5 6 7
    v       0 1 2 3            and back: first and last stage on the first rank,
            7 6 5 4            and the two stages in the middle side by side
    """

    LINEAR = "linear"
    LOOP = "loop"
    V = "v"

    def rank_of(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the rank of each stage. With one chunk per rank, all placements are the same."""
        down = tuple(range(ranks))
        back = down[::-1] if self is Placement.V else down
        return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else down))


def stages_by_rank(rank_of: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, in model order."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(rank_of):
        found[rank].append(stage)
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of the `pp` axis in one training step.

    `rank_of[s]` is the rank that holds stage `s`; `actions[r]` are the actions of rank `r`, first to last.
    """

    policy: str
    """Name of the policy that made it; `auto (…)` with its placement or policy where it was searched."""
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    bound: float | None = None
    """Lower bound on the length of any schedule that the search could choose; None without a search."""

    def __post_init__(self) -> None:
        if not self.actions or not self.rank_of:
            raise ScheduleError("a schedule without ranks or stages: give actions for at least one of each.")
        for stage, rank in enumerate(self.rank_of):
            if not 0 <= rank < self.ranks:
                raise ScheduleError(
                    f"stage {stage} is on rank {rank}, but there are actions for ranks 0 to "
                    f"{self.ranks - 1}: give a row of actions for each rank, or another rank_of."
                )

    @property
    def ranks(self) -> int:
        """Number of ranks along the `pp` axis."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks: `ranks × chunks`."""
        return len(self.rank_of)

    @property
    def order(self) -> tuple[tuple[str, ...], ...]:
        """The actions of each rank as text: `(("0F0", "0F1", …), …)`."""
        return tuple(tuple(str(action) for action in rank) for rank in self.actions)

    @cached_property
    def trains(self) -> bool:
        """Whether the schedule has backward actions, unlike schedules for evaluation and generation."""
        return any(action.kind is not Kind.F for rank in self.actions for action in rank)

    @cached_property
    def grid(self) -> Grid:
        """The time step of each action, if every action takes one step and runs as early as possible."""
        return fill_grid(self.actions, self.stages)

    @cached_property
    def event_order(self) -> EventOrder:
        """The actions in an order in which they can run, for simulations; ScheduleError for a deadlock."""
        order = event_order(self.actions, self.stages)
        if order.missing:
            raise _deadlock(order, self)
        return order

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in model order."""
        return self._stages[rank]

    def exchanges_before(self, stage: int) -> bool:
        """Return whether `stage` and the stage before it are on different ranks, which exchange messages."""
        return stage > 0 and self.rank_of[stage - 1] != self.rank_of[stage]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        return stages_by_rank(self.rank_of, self.ranks)

    @cached_property
    def splits(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind is Kind.W for row in self.actions for action in row)

    @cached_property
    def split_backward(self) -> Schedule:
        """The schedule with each full backward `B` split into `I` and `W`; itself where it has no `B`."""
        if not any(action.kind is Kind.B for row in self.actions for action in row):
            return self
        return replace(self, actions=tuple(tuple(_split(row)) for row in self.actions), bound=None)

    def __str__(self) -> str:
        return draw_grid(self.actions, self.grid)


def _split(row: tuple[Action, ...]) -> Iterator[Action]:
    for action in row:
        yield action.message_key
        if action.kind is Kind.B:
            yield action._replace(kind=Kind.W)


def _deadlock(order: EventOrder, schedule: Schedule) -> ScheduleError:
    rank = min(order.missing)
    action = schedule.actions[rank][sum(step[0] == rank for step in order.steps)]
    others = f", and {len(order.missing) - 1} more wait" if len(order.missing) > 1 else ""
    return ScheduleError(
        f"the schedule has a deadlock: rank {rank} waits at {action} for {order.missing[rank]}, which never "
        f"runs{others}; change the order of the actions, plait.check names the rule."
    )
