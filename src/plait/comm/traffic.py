"""Payload bytes and calls of communication, counted per axis and per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Counts = dict[str, dict[str, "Count"]]


@dataclass(frozen=True)
class Count:
    """How often one kind of operation ran, and how many payload bytes this rank handed in for it."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: Count) -> Count:
        return Count(self.calls - other.calls, self.bytes - other.bytes)


class Traffic:
    """Counts what one rank communicates: `{"dp": {"all_reduce": Count(calls, bytes)}}`.

    Groups of one rank count nothing. Bytes are those of the tensor that the rank handed in, so they say
    what the program asked for and do not depend on how a backend moves it.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}

    def record(self, axis: str, kind: str, bytes: int) -> None:
        """Count one call of `kind` along `axis` with `bytes` of payload."""
        kinds = self._counts.setdefault(axis, {})
        kinds[kind] = kinds.get(kind, Count()) + Count(1, bytes)

    def snapshot(self) -> Counts:
        """Everything counted so far, as a copy that later calls do not change."""
        return {axis: dict(kinds) for axis, kinds in self._counts.items()}

    def since(self, snapshot: Mapping[str, Mapping[str, Count]]) -> Counts:
        """What was counted after `snapshot` was taken; axes and kinds without a call are left out."""
        differences: Counts = {}
        for axis, kinds in self._counts.items():
            for kind, count in kinds.items():
                difference = count - snapshot.get(axis, {}).get(kind, Count())
                if difference.calls:
                    differences.setdefault(axis, {})[kind] = difference
        return differences
