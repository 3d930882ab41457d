"""A schedule: the actions of every rank, in order. Plain data to be drawn, checked, lowered and saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.event_order import EventOrder, event_order
from plait.schedules.step_grid import Grid, draw_grid, fill_grid


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
        """The actions in text form, per rank: `(("0F0", "0F1", …), …)`."""
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
        return event_order(self.actions, self.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in model order."""
        return self._stages[rank]

    def exchanges_before(self, stage: int) -> bool:
        """Return whether `stage` and the stage before it are on different ranks, which exchange messages."""
        return stage > 0 and self.rank_of[stage - 1] != self.rank_of[stage]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.actions]
        for stage, rank in enumerate(self.rank_of):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def splits(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind is Kind.W for row in self.actions for action in row)

    @cached_property
    def split_backward(self) -> Schedule:
        """The schedule with each full backward `B` split into `I` and `W`, as the executor runs it."""
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
