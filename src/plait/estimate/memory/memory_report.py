"""`Memory`: the predicted peak of each rank, from a ledger of memory blocks, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.estimate.memory.memory_ledger import Category
from plait.plan.plan import Plan
from plait.tensor.attention.ulysses import MethodChoice

OTHER = (Category.MESSAGES, Category.BATCH)
"""Uses that share a column of the table."""
NAMED = tuple(category for category in Category if category not in OTHER)
DIGITS = ((10**7, 3), (10**10, 1))
"""Pairs of an upper bound in bytes and the decimals of a megabyte shown below it."""


@dataclass(frozen=True)
class RankMemory:
    """Predicted memory of a rank, in bytes on the device of its layers; equal for all ranks along `dp`.

    `peak` is the most after an instruction of the second step, `most` the most within instructions too, and
    `at_rest` the memory allocated between steps.
    """

    rank: int
    """Index along `pp`. Along `tp` it is the first rank, which has the largest shards; along `cp` the one
    with the last position, which sees most keys of others."""
    peak: int
    at_peak: Mapping[Category, int]
    """The bytes at the peak, by use."""
    at: str
    """The instruction after which the peak is reached."""
    most: int
    at_rest: int
    host: int
    """Peak of the bytes offloaded to the CPU; 0 where layers run on the CPU."""


@dataclass(frozen=True)
class Memory:
    """Predicted memory of a plan. `print` it for a table of megabytes."""

    plan: Plan
    ranks: tuple[RankMemory, ...]
    """One for each rank of `pp`."""
    unsharded: int
    """The peak of the same plan with strategy `none`, in bytes."""
    has_activations: bool
    """Whether activations are counted: the shape of a batch is known."""
    attention: tuple[MethodChoice, ...] = ()
    """How attention layers read the other ranks' positions under context parallelism."""
    assumptions: tuple[str, ...] = ()
    """Sentences on what is taken for granted of a step, such as how tokens are routed."""
    worst: int | None = None
    """The largest `most`, in bytes, of a rank whose experts all tokens of the ranks of `ep` have; None where
    whole experts are on every rank."""

    @property
    def peak(self) -> int:
        """The most bytes allocated on any rank after an instruction, that is, without temporary memory."""
        return max(rank.peak for rank in self.ranks)

    @property
    def most(self) -> int:
        """The largest peak including temporary memory, in bytes: the memory that a device needs."""
        return max(rank.most for rank in self.ranks)

    @property
    def saving(self) -> float:
        """Fraction of memory that sharding saves: 1 - `peak` / the same plan's peak with strategy `none`."""
        return 1 - self.peak / self.unsharded if self.unsharded else 0.0

    def __str__(self) -> str:
        return "\n".join([*self._table(), *self._below()])

    def _table(self) -> list[str]:
        rows = [("rank", *NAMED, "other", "peak", "at rest"), *(self._row(rank) for rank in self.ranks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [" ".join(map(str.rjust, row, widths)) for row in rows]

    def _row(self, rank: RankMemory) -> tuple[str, ...]:
        other = sum(rank.at_peak[category] for category in OTHER)
        sizes = (*(rank.at_peak[category] for category in NAMED), other, rank.peak, rank.at_rest)
        return (str(rank.rank), *map(self._megabytes, sizes))

    def _below(self) -> list[str]:
        fullest = max(self.ranks, key=lambda rank: rank.peak)
        lines = [
            "MB (1e6 bytes) on the ranks along pp, each at its peak; at rest: between steps.",
            f"Rank {fullest.rank} has the largest peak, after {fullest.at}.",
            f"Within operations up to {self._megabytes(self.most)} MB are allocated.",
        ]
        if self.plan.strategy != "none":
            saving = (
                f"saves {self.saving:.0%} of" if self.saving >= 0 else f"takes {-self.saving:.0%} more than"
            )
            lines.append(f"The plan {saving} the {self._megabytes(self.unsharded)} MB of strategy none.")
        host = max(rank.host for rank in self.ranks)
        if host:
            lines.append(f"Offloaded to the CPU: {self._megabytes(host)} MB.")
        lines += (f"{choice}." for choice in self.attention)
        lines += self.assumptions
        if self.worst is not None:
            ranks, worst = self.plan.ep * self.plan.etp, self._megabytes(self.worst)
            lines.append(f"A rank to which all tokens of {ranks} ranks went would allocate up to {worst} MB.")
        if not self.has_activations:
            lines.append("Activations are not counted, because the shape of a batch is unknown: give inputs.")
        return lines

    def _megabytes(self, nbytes: int) -> str:
        digits = next((digits for below, digits in DIGITS if self.most < below), 0)
        return f"{nbytes / 1e6:,.{digits}f}"
