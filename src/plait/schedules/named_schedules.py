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

A building block tells when each stage runs micro-batch 0, and the period of later ones:

    rank 0  F0 F1 I1 I0 W1 W0    two ranks, placement v, period 6: one period in the steady state
    rank 1  W0 F0 F1 I1 I0 W1    (digits are chunks)

It describes a pipeline between filling and draining, and the memory that it takes then. Its actions are
placed along the path of one micro-batch, forward and back, each at the earliest time at which its rank is
free in every period. Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3; in compilers
this is modulo scheduling (Rau 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import NamedTuple, TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import SPLIT_KINDS, Action, Kind
from plait.schedules.schedule import Placement, Schedule, stages_by_rank

MOST_COUNT = 1_000_000
"""Most ranks, micro-batches or chunks."""

PerStage = Sequence[int]


class Lengths(NamedTuple):
    """Lengths of each stage's forward, input gradient and weight gradient, in cells (time steps)."""

    F: PerStage
    I: PerStage  # noqa: E741 (the field's letter)
    W: PerStage


class Delays(NamedTuple):
    """Least idle time, in cells (time steps), between consecutive actions of a building block."""

    forward: Sequence[int]
    """Per chunk: before each forward but that of the chunk's first stage."""
    backward: Sequence[int]
    """Per chunk: before each input gradient but that of the chunk's last stage."""
    turns: Sequence[int]
    """Before each change of chunk in the forwards; at the last stage; and in the input gradients."""


@dataclass(frozen=True)
class BuildingBlock:
    """One micro-batch's actions by time, repeated every `period` cells (time steps) without collisions."""

    rank_of: tuple[int, ...]
    lengths: Lengths
    period: int
    starts: Lengths

    @property
    def latency(self) -> int:
        """Cells (time steps) from a micro-batch's first forward to the end of its last input gradient."""
        return self.starts.I[0] + self.lengths.I[0]

    def peak(self, until_input: PerStage, until_weight: PerStage) -> int:
        """Return the largest memory of any rank once the block repeats, in the unit of the arguments.

        A micro-batch takes `until_input[s]` on stage `s` from its forward to its input gradient, and from
        there to its weight gradient `until_weight[s]`.
        """
        rows = stages_by_rank(self.rank_of, max(self.rank_of) + 1)
        return max(self._peak_of(stages, until_input, until_weight) for stages in rows)

    def _peak_of(self, stages: PerStage, until_input: PerStage, until_weight: PerStage) -> int:
        constant = 0
        changes = [0] * self.period
        for stage in stages:
            begin = self.starts.F[stage]
            middle = self.starts.I[stage] + self.lengths.I[stage]
            end = self.starts.W[stage] + self.lengths.W[stage]
            for first, last, amount in ((begin, middle, until_input), (middle, end, until_weight)):
                whole, rest = divmod(last - first, self.period)
                constant += whole * amount[stage]
                if rest:
                    constant += amount[stage] * (first % self.period + rest >= self.period)
                    changes[first % self.period] += amount[stage]
                    changes[last % self.period] -= amount[stage]
        use = most = constant
        for change in changes:
            use += change
            most = max(most, use)
        return most

    def orders(self, microbatches: int) -> list[list[Action]]:
        """Return each rank's actions for `microbatches` repetitions, in the order of their starts."""
        rows: list[list[tuple[int, Action]]] = [[] for _ in range(max(self.rank_of) + 1)]
        for stage, rank in enumerate(self.rank_of):
            for kind, starts in zip(SPLIT_KINDS, self.starts, strict=True):
                for microbatch in range(microbatches):
                    start = starts[stage] + microbatch * self.period
                    rows[rank].append((start, Action(stage, kind, microbatch)))
        return [[action for _, action in sorted(row)] for row in rows]


def build_block(
    rank_of: Sequence[int], lengths: Lengths, period: int, delays: Delays
) -> BuildingBlock | None:
    """Return the building block (one micro-batch's actions) with these delays, None if they do not fit."""
    stages, ranks = len(rank_of), max(rank_of) + 1
    taken, full = [0] * ranks, False  # per rank, the occupied cells of the period as bits of an integer
    turns = iter(delays.turns)

    def place(rank: int, ready: int, length: int) -> int:
        """Occupy the first `length` consecutive free time cells from `ready` on; return their start."""
        nonlocal full
        for start in range(ready, ready + period):
            cells = ((1 << length) - 1) << start % period
            cells = (cells | cells >> period) & ((1 << period) - 1)
            if not taken[rank] & cells:
                taken[rank] |= cells
                return start
        full = True
        return ready

    forwards, inputs, weights = [0] * stages, [0] * stages, [0] * stages
    ready = 0
    for stage, rank in enumerate(rank_of):
        if stage:
            ready += delays.forward[stage // ranks] if stage % ranks else next(turns)
        forwards[stage] = place(rank, ready, lengths.F[stage])
        ready = forwards[stage] + lengths.F[stage]
    ready += next(turns)
    for stage in range(stages)[::-1]:
        rank = rank_of[stage]
        if stage + 1 < stages:
            ready += delays.backward[stage // ranks] if (stage + 1) % ranks else next(turns)
        inputs[stage] = place(rank, ready, lengths.I[stage])
        ready = inputs[stage] + lengths.I[stage]
    for stage in range(stages)[::-1]:
        after = inputs[stage] + lengths.I[stage]
        weights[stage] = place(rank_of[stage], after, lengths.W[stage])
    starts = Lengths(forwards, inputs, weights)
    return None if full else BuildingBlock(tuple(rank_of), lengths, period, starts)


def smallest_block(rank_of: Sequence[int], pause: int) -> BuildingBlock:
    """Return the building block of least memory for 2 stages per rank in a V, given a delay `pause`.

    Every action takes one cell. `pause` is the delay before the forwards of the second chunk and the input
    gradients of the first: the larger it is, the longer a micro-batch of either chunk stays on a rank, the
    same on all ranks.
    """
    ones = (1,) * len(rank_of)
    turns = product(range(3), repeat=3)
    found = (
        build_block(rank_of, Lengths(ones, ones, ones), 6, Delays((0, pause), (pause, 0), turn))
        for turn in turns
    )
    return min(filter(None, found), key=lambda block: (block.peak(ones, ones), block.latency))


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
