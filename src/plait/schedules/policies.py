"""Named schedules. A policy is small: where stages live, and how many micro-batches a rank may hold.

rank 0:  F0 F1 F2 F3 B0 B1 B2 B3           gpipe: as many as there are
rank 1:     F0 F1 F2 F3 B0 B1 B2 B3

rank 0:  F0 F1    B0 F2 B1 F3 B2    B3     1f1b: as many as there are stages from here to the end
rank 1:     F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.schedule import Schedule

InFlight = Callable[[int, int, int], int]
"""`(rank, ranks, microbatches)` → the most micro-batches whose forward ran and whose backward did not."""

POLICIES: dict[str, InFlight] = {
    "gpipe": lambda rank, ranks, microbatches: microbatches,
    "1f1b": lambda rank, ranks, microbatches: ranks - rank,
}


def schedule(policy: str, *, ranks: int, microbatches: int) -> Schedule:
    """The schedule that `policy` makes for one stage on each of `ranks` ranks.

    gpipe: Huang et al. 2019, section 2.3. 1f1b: Narayanan et al. 2021 (PipeDream-Flush), section 2.2.
    """
    if policy not in POLICIES:
        near = get_close_matches(policy, POLICIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(POLICIES)}."
        raise ScheduleError(f"there is no schedule policy {policy!r}: {hint}")
    require_positive(ranks=ranks, microbatches=microbatches)
    in_flight = POLICIES[policy]
    actions = tuple(
        tuple(capped(rank, microbatches, in_flight(rank, ranks, microbatches))) for rank in range(ranks)
    )
    return Schedule(policy, microbatches, tuple(range(ranks)), actions)


def capped(stage: int, microbatches: int, cap: int) -> Iterator[Action]:
    """Forward while fewer than `cap` micro-batches are in flight, otherwise backward of the oldest."""
    forwards = 0
    for backwards in range(microbatches):
        while forwards < microbatches and forwards - backwards < cap:
            yield Action(stage, Kind.F, forwards)
            forwards += 1
        yield Action(stage, Kind.B, backwards)


def forward_only(rank_of: tuple[int, ...], *, ranks: int, microbatches: int) -> Schedule:
    """Forwards and nothing else, for evaluation and generation: by micro-batch, then by stage."""
    require_positive(ranks=ranks, microbatches=microbatches)
    actions = tuple(
        tuple(
            Action(stage, Kind.F, microbatch)
            for microbatch in range(microbatches)
            for stage, owner in enumerate(rank_of)
            if owner == rank
        )
        for rank in range(ranks)
    )
    return Schedule("forward", microbatches, rank_of, actions)


def require_positive(**counts: int) -> None:
    """ScheduleError for the first count below one, named."""
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} is {count}: a schedule needs at least 1.")
