"""A schedule: the actions of every rank, in order. Plain data to draw, check, lower and exchange."""

from __future__ import annotations

from dataclasses import dataclass

from plait.schedules.action import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """What each rank of the `pp` axis does in one training step.

    `rank_of[s]` is the rank on which stage `s` lives; `actions[r]` what rank `r` does, first to last.
    """

    policy: str
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

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

    @property
    def trains(self) -> bool:
        """Whether any backward is in it; evaluation and generation run schedules of forwards only."""
        return any(action.kind is not Kind.F for rank in self.actions for action in rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on `rank`, in model order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __str__(self) -> str:
        width = max((len(text) for rank in self.order for text in rank), default=0)
        lines = [" ".join(text.rjust(width) for text in rank) for rank in self.order]
        return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))
