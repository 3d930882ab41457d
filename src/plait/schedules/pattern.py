"""Patterns that repeat: when each stage works on micro-batch 0; every other does the same a period later.

    rank 0  F0 F1 I1 I0 W1 W0    two ranks, placement v, period 6: what is drawn is one period, in the
    rank 1  W0 F0 F1 I1 I0 W1    steady state (digits are chunks)

A pattern says how a pipeline runs between filling and draining, and how much it holds then. It is laid out
along the way of one micro-batch, forward and back, each action at the first time from which it collides with
no other on its rank. Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (building
blocks); modulo scheduling, as compilers know it (Rau 1994).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from plait.schedules.action import Action, Kind

KINDS = (Kind.F, Kind.I, Kind.W)
PerStage = Sequence[int]


class Lengths(NamedTuple):
    """How many cells a forward, an input gradient and a weight gradient take, per stage."""

    F: PerStage
    I: PerStage  # noqa: E741 (the field's letter)
    W: PerStage


class Delays(NamedTuple):
    """What keeps the micro-batch from going on at once, in cells."""

    forward: Sequence[int]
    """Per chunk: before each stage's forward but the first of the chunk."""
    backward: Sequence[int]
    """Per chunk: before each stage's input gradient but the last stage's of the chunk."""
    turns: Sequence[int]
    """Before each change of chunk, on the way forth; at the last stage; and on the way back."""


@dataclass(frozen=True)
class Pattern:
    """When the actions of micro-batch 0 start, per stage, on ranks that repeat every `period` cells."""

    rank_of: tuple[int, ...]
    lengths: Lengths
    period: int
    starts: Lengths

    @property
    def through(self) -> int:
        """Cells from the start of a micro-batch's first forward to the end of its last input gradient."""
        return self.starts.I[0] + self.lengths.I[0]

    def peak(self, until_input: PerStage, until_weight: PerStage) -> int:
        """The most that a rank holds in the steady state.

        A micro-batch holds `until_input[s]` on stage `s` from its forward to its input gradient, and from
        then to its weight gradient `until_weight[s]`.
        """
        return max(self._peak_of(rank, until_input, until_weight) for rank in range(max(self.rank_of) + 1))

    def _peak_of(self, rank: int, until_input: PerStage, until_weight: PerStage) -> int:
        always = 0
        changes = [0] * self.period
        for stage in self._stages_of(rank):
            begin = self.starts.F[stage]
            turned = self.starts.I[stage] + self.lengths.I[stage]
            end = self.starts.W[stage] + self.lengths.W[stage]
            for first, last, amount in ((begin, turned, until_input), (turned, end, until_weight)):
                whole, rest = divmod(last - first, self.period)
                always += whole * amount[stage]
                if rest:
                    always += amount[stage] * (first % self.period + rest >= self.period)
                    changes[first % self.period] += amount[stage]
                    changes[last % self.period] -= amount[stage]
        held = most = always
        for change in changes:
            held += change
            most = max(most, held)
        return most

    def orders(self, microbatches: int) -> list[list[Action]]:
        """What each rank does, in the order of starts, for so many micro-batches."""
        return [
            [action for _, action in sorted(self._timed(rank, microbatches))]
            for rank in range(max(self.rank_of) + 1)
        ]

    def _timed(self, rank: int, microbatches: int) -> Iterator[tuple[int, Action]]:
        for stage in self._stages_of(rank):
            for kind, starts in zip(KINDS, self.starts, strict=True):
                for microbatch in range(microbatches):
                    yield starts[stage] + microbatch * self.period, Action(stage, kind, microbatch)

    def _stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]


def repeat(rank_of: Sequence[int], lengths: Lengths, period: int, delays: Delays) -> Pattern | None:
    """The pattern with these delays, or None where the ranks have no room for it in so short a period."""
    stages, ranks = len(rank_of), max(rank_of) + 1
    layout = _Layout(period, [0] * ranks)
    turns = iter(delays.turns)
    forwards, inputs, weights = [0] * stages, [0] * stages, [0] * stages
    ready = 0
    for stage, rank in enumerate(rank_of):
        if stage:
            ready += delays.forward[stage // ranks] if stage % ranks else next(turns)
        forwards[stage] = layout.place(rank, ready, lengths.F[stage])
        ready = forwards[stage] + lengths.F[stage]
    ready += next(turns)
    for stage in range(stages)[::-1]:
        rank = rank_of[stage]
        if stage + 1 < stages:
            ready += delays.backward[stage // ranks] if (stage + 1) % ranks else next(turns)
        inputs[stage] = layout.place(rank, ready, lengths.I[stage])
        ready = inputs[stage] + lengths.I[stage]
    for stage in range(stages)[::-1]:
        after = inputs[stage] + lengths.I[stage]
        weights[stage] = layout.place(rank_of[stage], after, lengths.W[stage])
    starts = Lengths(forwards, inputs, weights)
    return None if layout.full else Pattern(tuple(rank_of), lengths, period, starts)


def tightest(rank_of: Sequence[int], pause: int) -> Pattern:
    """Of the patterns of two chunks in a v with unit lengths and `pause`, the one that holds least.

    `pause` is the delay before the forwards of the second chunk and the input gradients of the first: the
    larger it is, the longer a rank holds a micro-batch of either chunk, all ranks alike.
    """
    ones = (1,) * len(rank_of)
    turns = product(range(3), repeat=3)
    found = (
        repeat(rank_of, Lengths(ones, ones, ones), 6, Delays((0, pause), (pause, 0), turn)) for turn in turns
    )
    return min(filter(None, found), key=lambda pattern: (pattern.peak(ones, ones), pattern.through))


class _Layout:
    """One period of each rank, as the bits of a number: which cells are taken."""

    def __init__(self, period: int, taken: list[int]) -> None:
        self.period = period
        self.taken = taken
        self.full = False

    def place(self, rank: int, ready: int, length: int) -> int:
        """Take `length` cells in a row from the first time on at which they are free."""
        period, everything = self.period, (1 << self.period) - 1
        for start in range(ready, ready + period):
            cells = ((1 << length) - 1) << start % period
            cells = (cells | cells >> period) & everything
            if not self.taken[rank] & cells:
                self.taken[rank] |= cells
                return start
        self.full = True
        return ready
