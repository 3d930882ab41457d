"""The comparison of sums between the ranks that hold the same tensors: 8 bytes for each kind of replica.

What a rank holds is added up, by the ranks that hold the same: those along the same axes and stages. The
ranks gather these numbers, and each knows at once whether all replicas are alike, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.engine.corruption.recorded_sums import RecordedSum
from plait.engine.sharding.replica_check import salt_of
from plait.engine.sharding.unit import Owners
from plait.plan.layout.layout import Layout, Shard
from plait.plan.shard_plan import replica_ranks
from plait.ranks.collectives import all_gather
from plait.ranks.device import moved_later, read_later
from plait.ranks.mesh import Mesh


class ReplicaSums:
    """Compares recorded sums with those of the other ranks that hold the same tensors."""

    def __init__(self, layouts: Mapping[str, Layout], owners: Owners, mesh: Mesh) -> None:
        self._mesh = mesh
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
        self._factors: tuple[Sequence[object], Tensor, Tensor] | None = None
        """Of the latest sums: their names, the row of each, and an odd number that multiplies it."""

    @property
    def are_needed(self) -> bool:
        """Whether any two ranks hold the same; equal on all ranks."""
        return bool(self._replicas)

    def compare(self, entries: Sequence[RecordedSum]) -> Callable[[], list[tuple[int, ...]]]:
        """Start to compare the sums; return a function that returns the sets of ranks that differ.

        It is the same on all ranks. Communication: 8 bytes for each kind of replica and rank over `world`.
        """
        device = self._mesh.device
        numbers = torch.zeros(self._count, dtype=torch.int64, device=device)
        if entries:
            rows, factors = self._factors_of(entries)
            sums = torch.stack([moved_later(one.sum, device) for one in entries])
            numbers.index_add_(0, rows, sums * factors)
        gathered = all_gather(numbers, self._mesh.group("world"), checked=False).about("sums of replicas")

        def read() -> list[tuple[int, ...]]:
            everyone = read_later(gathered.wait())().view(-1, self._count)
            different = []
            for row, alike in self._replicas:
                held = everyone[list(alike), row]
                if (held != held[0]).any():
                    different.append(tuple(alike))
            return different

        return read

    def _factors_of(self, entries: Sequence[RecordedSum]) -> tuple[Tensor, Tensor]:
        """Return of each sum the kind of replica, and the odd number that multiplies it."""
        names = [(one.named.parameter, one.named.what) for one in entries]
        if self._factors is None or self._factors[0] != names:
            rows = [self._rows[parameter] for parameter, _ in names]
            odd = [salt_of(f"{what} of {parameter}")[1] for parameter, what in names]
            on_device = [moved_later(torch.tensor(each), self._mesh.device) for each in (rows, odd)]
            self._factors = names, on_device[0], on_device[1]
        return self._factors[1:]


def _places(layout: Layout) -> tuple[object, ...]:
    """Return for each axis what decides which of its ranks hold the same."""
    return tuple(
        (type(one).__name__, one.copies if isinstance(one, Shard) else 1) for one in layout.placements
    )
