"""A building block: when each stage runs micro-batch 0, and the period after which later ones follow.

    rank 0  F0 F1 I1 I0 W1 W0    two ranks, placement v, period 6: one period in the steady state
    rank 1  W0 F0 F1 I1 I0 W1    (digits are chunks)

It describes a pipeline between filling and draining, and the memory that it takes then. Its actions are
placed along the path of one micro-batch, forward and back, each at the earliest time at which its rank is
free in every period. Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3; in compilers
this is modulo scheduling (Rau 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from plait.schedules.action import SPLIT_KINDS, Action
from plait.schedules.schedule import stages_by_rank

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
