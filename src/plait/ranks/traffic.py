"""Payload bytes and calls of communication, counted per axis and per kind; time blocked in waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    sends for it; of an all-to-all in uneven pieces, those of the pieces for other ranks.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}
        self.blocked_nanoseconds = 0
        """Time for which this rank's host was blocked in waits so far; NCCL's waits do not block it."""
        self.waits: list[Wait] | None = None
        """Waits are added to this list, if there is one."""

    def record_wait(self, axis: str, start: int, end: int) -> None:
        """Count a wait of the host for an operation along `axis`, in nanoseconds of `perf_counter_ns`."""
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
