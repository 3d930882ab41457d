"""`ReplicaChecksums`: compares checksums of tensors between ranks that hold the same ones (replicas).

What a rank holds is added up, by the ranks that hold the same: those along the same axes and stages. The
ranks gather these numbers, and each knows at once whether all replicas are alike, on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.engine.blueprint import Blueprint
from plait.engine.corruption.recorded_checksums import STATE, NamedTensor, RecordedChecksums, RecordedNumbers
from plait.engine.sharding.replica_check import salt_of
from plait.plan.layout.layout import Layout, Shard
from plait.plan.shard_plan import replica_ranks
from plait.ranks.accelerator import is_accelerator, moved_later, read_later
from plait.ranks.collectives import all_gather
from plait.ranks.mesh import Mesh


class UnlikeReplicas(NamedTuple):
    """Ranks that should hold the same tensors, but whose checksums of them differ."""

    ranks: tuple[int, ...]
    minority: tuple[int, ...]
    """Those that differ from what more than half of the ranks have; () where no sum is that of so many."""


class ReplicaChecksums:
    """Compares recorded checksums with those of other ranks that hold the same tensors."""

    def __init__(self, blueprint: Blueprint, mesh: Mesh, *, with_state: bool) -> None:
        """`with_state`: whether ranks that hold the same parameter also hold the same optimizer state."""
        self._mesh, self._with_state = mesh, with_state
        layouts, owners = blueprint.layouts, blueprint.owners
        kinds: dict[object, str] = {}
        self._rows: dict[str, int] = {}
        """For each parameter of the model, the number of its kind of replica."""
        for name, layout in layouts.items():
            kind = (layout.axes, layout.degrees, _places(layout), owners[name])
            kinds.setdefault(kind, name)
            self._rows[name] = list(kinds).index(kind)
        ranks = range(mesh.size("world"))
        self._replicas: list[tuple[int, Sequence[int]]] = []
        """Each kind that several ranks hold, and each set of ranks that hold the same."""
        for row, name in enumerate(kinds.values()):
            sets = {
                replica_ranks(layouts[name], mesh.coordinate_of(rank), owners[name], mesh.sizes)
                for rank in ranks
            }
            self._replicas += [(row, alike) for alike in sorted(sets) if len(alike) > 1]
        self._count = len(kinds)
        self._factors: dict[tuple[int, int], tuple[Sequence[int], Tensor, Tensor]] = {}
        """By place of what was recorded: its owners, and of each number its kind of replica and a factor."""

    @property
    def are_needed(self) -> bool:
        """Whether any two ranks hold the same tensors; the answer is equal on all ranks."""
        return bool(self._replicas)

    def compare(self, recorded: Sequence[RecordedChecksums]) -> Callable[[], list[UnlikeReplicas]]:
        """Start to compare checksums; return a function that returns the sets of ranks that differ.

        It is the same on all ranks. Communication: 8 bytes for each kind of replica and rank over `world`.
        """
        device = self._mesh.device
        totals = torch.zeros(self._count + 1, dtype=torch.int64, device=device)
        for number, one in enumerate(recorded):
            for place, part in enumerate(one.parts):
                rows, factors = self._rows_and_factors((number, place), one.tensors, part)
                totals.index_add_(0, rows, moved_later(part.numbers, device) * factors)
        group, count = self._mesh.group("world"), self._count
        gathered = all_gather(totals[:count], group, checked=False).about("sums of replicas")

        # On a GPU copied now, and not after all that the pass will compute; a CPU waits for ranks later.
        copied = read_later(gathered.wait()) if is_accelerator(device) else gathered.wait

        def read() -> list[UnlikeReplicas]:
            everyone = copied().view(-1, count)
            held = ((alike, everyone[list(alike), row]) for row, alike in self._replicas)
            return [unlike(alike, sums.tolist()) for alike, sums in held if (sums != sums[0]).any()]

        return read

    def _rows_and_factors(
        self, place: tuple[int, int], tensors: Sequence[NamedTensor], part: RecordedNumbers
    ) -> tuple[Tensor, Tensor]:
        """Return for each recorded number its row in the table of sums, and the odd factor of it there."""
        known = self._factors.get(place)
        if known is None or known[0] is not part.owners:
            each = Counter[int]()
            rows, odd = [], []
            for owner in part.owners:
                rows.append(self._row(tensors[owner]))
                odd.append(salt_of(f"{each[owner]} of {tensors[owner]}")[1])
                each[owner] += 1
            on_device = [moved_later(torch.tensor(one), self._mesh.device) for one in (rows, odd)]
            known = self._factors[place] = part.owners, on_device[0], on_device[1]
        return known[1:]

    def _row(self, named: NamedTensor) -> int:
        """Return the row of the table of sums to which a tensor is added; the last row is not compared."""
        is_alike = named.what in ("value", "gradient") or (self._with_state and named.what.startswith(STATE))
        return self._rows.get(named.parameter, self._count) if is_alike else self._count


def unlike(ranks: Sequence[int], sums: Sequence[int]) -> UnlikeReplicas:
    """Return the ranks of a group whose checksums differ, and which of them differ from the majority."""
    most, count = Counter(sums).most_common(1)[0]
    minority = [rank for rank, one in zip(ranks, sums, strict=True) if one != most]
    return UnlikeReplicas(tuple(ranks), tuple(minority) if 2 * count > len(ranks) else ())


def _places(layout: Layout) -> tuple[object, ...]:
    """Return how a layout places a tensor on each axis, equal for tensors with the same replicas."""
    return tuple(
        (type(one).__name__, one.copies if isinstance(one, Shard) else 1) for one in layout.placements
    )
