"""A group: ranks that communicate along one axis of the mesh; counts of its payload bytes and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plait.ranks.failure.failure_log import FailureLog
from plait.ranks.failure.operation_watch import OperationWatch
from plait.ranks.transport.interface import Transport

Counts = dict[str, dict[str, "Count"]]
Wait = tuple[str, int, int]
"""The axis, and the start and end of a wait, in nanoseconds of `time.perf_counter_ns`."""


@dataclass(frozen=True)
class Count:
    """Calls of one kind of operation, and the payload bytes that this rank passed to them."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: Count) -> Count:
        return Count(self.calls - other.calls, self.bytes - other.bytes)


class Traffic:
    """Counts the communication of one rank: `{"dp": {"all_reduce": Count(calls, bytes)}}`.

    Groups of one rank count nothing. Bytes are those of the tensor that the rank passed, whatever a backend
    sends for it; of an all-to-all in uneven ranges, those of the ranges for other ranks.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}
        self.blocked_nanoseconds = 0
        """Time for which this rank's host was blocked in waits so far; NCCL's waits do not block it."""
        self.waits: list[Wait] | None = None
        """Waits are added to this list, if there is one."""
        self.stamp: Callable[[], object] | None = None
        """Returns the time of the clock that measures an action, while one runs that is measured."""
        self.stamped_waits: list[tuple[object, object]] = []
        """The stamps before and after each wait in that action."""

    def record_wait(self, axis: str, start: int, end: int) -> None:
        """Count the nanoseconds from `start` to `end`, in which the host waited for an operation."""
        self.blocked_nanoseconds += end - start
        if self.waits is not None:
            self.waits.append((axis, start, end))

    def record(self, axis: str, kind: str, bytes: int) -> None:
        """Count one call of an operation, such as `all_reduce`, along `axis` with `bytes` of payload."""
        kinds = self._counts.setdefault(axis, {})
        kinds[kind] = kinds.get(kind, Count()) + Count(1, bytes)

    def snapshot(self) -> Counts:
        """Return a copy of all counts so far."""
        return {axis: dict(kinds) for axis, kinds in self._counts.items()}

    def since(self, snapshot: Mapping[str, Mapping[str, Count]]) -> Counts:
        """Return the counts since `snapshot` was taken, without axes and operations that have no calls."""
        differences: Counts = {}
        for axis, kinds in self._counts.items():
            for kind, count in kinds.items():
                difference = count - snapshot.get(axis, {}).get(kind, Count())
                if difference.calls:
                    differences.setdefault(axis, {})[kind] = difference
        return differences


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
    on_skip: Callable[[Group, str, Tensor], None] | None = None
    """Called by `skip` with its arguments, in estimates."""

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
        """The global ranks of the group's other members."""
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

    def skip(self, kind: str, tensor: Tensor) -> None:
        """Pass a collective that does not run, in a group without transport, to `on_skip`, if that is set.

        So estimates count it: its input `tensor` is on the meta device.
        """
        if self.on_skip is not None and self.size > 1:
            self.on_skip(self, kind, tensor)

    def __deepcopy__(self, memo: object) -> Group:
        """Return this group itself, so that a copied module communicates with the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Group({self.name}: ranks {', '.join(map(str, self.ranks))}; index {self.index})"


def alone(axis: str) -> Group:
    """Return a group of one rank along `axis`, whose operations need no backend and count nothing."""
    return Group(axis, (0,), 0, None, Traffic(), 0.0)
