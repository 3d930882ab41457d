"""Schedules by name. A policy sets the placement of stages, the number of warm-up forwards and the lag of W.

rank 0  F0 F1 F2 F3 B0 B1 B2 B3            gpipe: all forwards first
rank 1  F0 F1 F2 F3 B0 B1 B2 B3

rank 0  F0 F1 B0 F2 B1 F3 B2 B3            1f1b: as many ahead as there are ranks from here on
rank 1  F0 B0 F1 B1 F2 B2 F3 B3

rank 0  F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 …    zb-h1: as 1f1b, and W lags behind I by the rank's number
rank 1  F0 I0 F1 I1 W0 F2 I2 W1 F3 …

rank 0  F0 F1 F2 I0 W0 F3 I1 W1 …          zb-h2: nearly twice as many ahead
rank 1  F0 I0 F1 I1 F2 I2 W0 F3 …

rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 …  interleaved: chunk by chunk, for a group of micro-batches at
rank 1  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 …  a time, at least as many as there are ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.building_block import smallest_block
from plait.schedules.schedule import Placement, Schedule, stages_by_rank

MOST_COUNT = 1_000_000
"""Most ranks, micro-batches or chunks."""


class RankPosition(NamedTuple):
    """A rank's number, and how many ranks, micro-batches and chunks there are: what a policy decides by."""

    rank: int
    ranks: int
    microbatches: int
    chunks: int

    @property
    def groups(self) -> list[range]:
        """Groups of micro-batches that run through one chunk of the model before the next chunk."""
        count = max(self.microbatches // self.ranks, 1)
        firsts = [-(-self.microbatches * number // count) for number in range(count + 1)]
        return [range(first, after) for first, after in pairwise(firsts)]


@dataclass(frozen=True)
class AlternatingPolicy:
    """Policy by which a rank runs warm-up forwards, then backwards and forwards in turn (1F1B)."""

    placement: Placement
    chunks: int
    """Default number of stages per rank; the only one for a linear placement."""
    ahead: Callable[[RankPosition], int]
    """Forwards of a rank before its first backward."""
    lag: Callable[[RankPosition], int] | None = None
    """Number of actions by which `W` lags behind `I`; None: both are one action, `B`."""


@dataclass(frozen=True)
class BlockPolicy:
    """Policy for two stages per rank in a V: each rank repeats the actions of `smallest_block`."""

    pause: int
    peak: Callable[[int], int]
    """Most micro-batches that a rank holds, by the number of ranks."""
    placement = Placement.V
    chunks = 2


Policy: TypeAlias = AlternatingPolicy | BlockPolicy

POLICIES: dict[str, Policy] = {
    # Huang et al. 2019 "GPipe", section 2.3.
    "gpipe": AlternatingPolicy(Placement.LINEAR, 1, ahead=lambda at: at.microbatches),
    # Narayanan et al. 2021 "Memory-Efficient Pipeline-Parallel DNN Training", section 3.2 (PipeDream-Flush).
    "1f1b": AlternatingPolicy(Placement.LINEAR, 1, ahead=lambda at: at.ranks - at.rank),
    # Narayanan et al. 2021 "Efficient Large-Scale Language Model Training", section 2.2.
    "interleaved": AlternatingPolicy(
        Placement.LOOP, 2, ahead=lambda at: (at.chunks - 1) * len(at.groups[0]) + 2 * (at.ranks - at.rank) - 1
    ),
    # Qi et al. 2023 "Zero Bubble Pipeline Parallelism", sections 2.1 and 2.2.
    "zb-h1": AlternatingPolicy(
        Placement.LINEAR, 1, ahead=lambda at: at.ranks - at.rank, lag=lambda at: at.rank
    ),
    "zb-h2": AlternatingPolicy(
        Placement.LINEAR, 1, ahead=lambda at: 2 * (at.ranks - at.rank) - 1, lag=lambda at: 2 * at.rank
    ),
    # The same, section 6.
    "zb-v": BlockPolicy(pause=4, peak=lambda ranks: ranks),
    # Qi et al. 2024 "Pipeline Parallelism with Controllable Memory", section 3.
    "v-half": BlockPolicy(pause=1, peak=lambda ranks: (ranks + 2) // 2),
    "v-min": BlockPolicy(pause=0, peak=lambda ranks: (ranks + 4) // 3),
}


def policies_for(placement: Placement, chunks: int) -> list[str]:
    """Return the names of the policies that allow this placement and number of chunks per rank."""
    return [
        name
        for name, policy in POLICIES.items()
        if policy.placement is placement and (placement is Placement.LOOP or chunks == policy.chunks)
    ]


def policy_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule of the policy `POLICIES[name]`; it does not depend on costs.

    Raises ScheduleError for counts below one, and for a number of chunks that the policy does not allow.
    """
    policy = POLICIES[name]
    chunks = policy.chunks if chunks is None else chunks
    require_positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if name not in policies_for(policy.placement, chunks):
        raise ScheduleError(f"chunks is {chunks}, but {name} takes {policy.chunks} only: set it to that.")
    rank_of = policy.placement.rank_of(ranks, chunks)
    if isinstance(policy, BlockPolicy):
        rows = smallest_block(rank_of, policy.pause).orders(microbatches)
    else:
        at = (RankPosition(rank, ranks, microbatches, chunks) for rank in range(ranks))
        rows = [list(_alternating(policy, one)) for one in at]
    return Schedule(name, microbatches, rank_of, tuple(map(tuple, rows)))


def _alternating(policy: AlternatingPolicy, at: RankPosition) -> Iterator[Action]:
    forwards = _by_groups(at, Kind.F)
    inputs = _by_groups(at, Kind.B if policy.lag is None else Kind.I)
    weights = _by_groups(at, Kind.W)
    lag = 0 if policy.lag is None else policy.lag(at)
    yield from islice(forwards, policy.ahead(at))
    for number, action in enumerate(inputs):
        yield action
        if policy.lag is not None and number >= lag:
            yield next(weights)
        yield from islice(forwards, 1)
    if policy.lag is not None:
        yield from weights


def _by_groups(at: RankPosition, kind: Kind) -> Iterator[Action]:
    """Yield a rank's actions of one kind: by group of micro-batches, within it chunk by chunk."""
    stages = range(at.rank, at.ranks * at.chunks, at.ranks)
    for group in at.groups:
        for stage in stages if kind is Kind.F else reversed(stages):
            for microbatch in group:
                yield Action(stage, kind, microbatch)


def forward_only(rank_of: tuple[int, ...], *, ranks: int, microbatches: int) -> Schedule:
    """Return a schedule of forwards for evaluation and generation, ordered by micro-batch, then by stage."""
    require_positive(ranks=ranks, microbatches=microbatches)
    actions = tuple(
        tuple(Action(stage, Kind.F, microbatch) for microbatch in range(microbatches) for stage in stages)
        for stages in stages_by_rank(rank_of, ranks)
    )
    return Schedule("forward", microbatches, rank_of, actions)


def require_positive(**counts: int) -> None:
    """Raise ScheduleError for the first count that is not an integer from 1 to a million."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_COUNT:
            raise ScheduleError(f"{name} is {count!r}: give a whole number from 1 to {MOST_COUNT:,}.")
