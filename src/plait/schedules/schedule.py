"""A schedule: the actions of every rank, in order. Plain data to draw, check, lower and exchange."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.grid import Grid, draw, fill


@dataclass(frozen=True)
class Schedule:
    """What each rank of the `pp` axis does in one training step.

    `rank_of[s]` is the rank on which stage `s` lives; `actions[r]` what rank `r` does, first to last.
    """

    policy: str
    """Who made it; of a search, what won."""
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    bound: float | None = None
    """Of a search: what no schedule can be shorter than that it was allowed to choose from."""

    def __post_init__(self) -> None:
        if not self.actions or not self.rank_of:
            raise ScheduleError("a schedule without ranks or stages: give actions for at least one of each.")
        for stage, rank in enumerate(self.rank_of):
            if not 0 <= rank < self.ranks:
                raise ScheduleError(
                    f"stage {stage} lives on rank {rank}, but there are actions for ranks 0 to "
                    f"{self.ranks - 1}: give a row of actions for each rank, or another rank_of."
                )

    @property
    def ranks(self) -> int:
        """Ranks along the `pp` axis."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Stages over all ranks: `ranks × chunks`."""
        return len(self.rank_of)

    @property
    def order(self) -> tuple[tuple[str, ...], ...]:
        """The actions in text form, per rank: `(("0F0", "0F1", …), …)`."""
        return tuple(tuple(str(action) for action in rank) for rank in self.actions)

    @cached_property
    def trains(self) -> bool:
        """Whether any backward is in it; evaluation and generation run schedules of forwards only."""
        return any(action.kind is not Kind.F for rank in self.actions for action in rank)

    @cached_property
    def grid(self) -> Grid:
        """At which step each action runs, if each takes one step and runs as soon as it can."""
        return fill(self.actions, self.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on `rank`, in model order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __str__(self) -> str:
        return draw(self.actions, self.grid)
