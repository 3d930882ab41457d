"""A group: the ranks that communicate with each other along one axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from plait.ranks.failure.failures import FailureLog
from plait.ranks.failure.operation_watch import OperationWatch
from plait.ranks.traffic import Traffic
from plait.ranks.transport.interface import Transport


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that take part in an operation, usually those along one mesh axis. Made by a mesh.

    Operations take a group explicitly and address ranks by their index in `ranks`. Without a `transport`
    the rank is alone: no backend is needed, operations return their input and count nothing.
    """

    name: str
    """The axis, under which traffic is counted: `"pp"`, `"dp"`, `"world"`, ..."""
    ranks: tuple[int, ...]
    """Global ranks, in order of their index."""
    index: int
    """This rank's index in `ranks`."""
    transport: Transport | None
    traffic: Traffic
    timeout: float
    """Seconds after which a wait fails."""
    failure_log: FailureLog | None = None
    """The failure log of the group's ranks; None without a store."""
    guarded: bool = False
    """Whether every collective, and the input of every region, is checked on all ranks first: see `Mesh`."""
    operation_watch: OperationWatch | None = None
    """On NCCL the watch over operations that were waited for, which raise no errors themselves; else None."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's global number."""
        return self.ranks[self.index]

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The other members' global numbers."""
        return tuple(rank for rank in self.ranks if rank != self.rank)

    @cached_property
    def with_others(self) -> str:
        """The group's name and other members as text for errors; computed once."""
        return f"{self.name} with {', '.join(map(str, self.others))}"

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on one host."""
        return self.transport is None or self.transport.on_one_host

    def device_for_text(self, device: torch.device) -> torch.device:
        """Return the device to communicate text and small numbers on: the CPU if supported, else `device`."""
        on_cpu = self.transport is None or self.transport.carries_cpu_tensors
        return torch.device("cpu") if on_cpu else device

    def abort(self, cause: Exception) -> None:
        """Make pending operations fail soon, on this and the other ranks, after an operation has failed."""
        if self.transport is not None:
            self.transport.abort(cause)

    def __deepcopy__(self, memo: object) -> Group:
        """Return this group itself, so that a copied module communicates with the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Group({self.name}: ranks {', '.join(map(str, self.ranks))}; index {self.index})"
