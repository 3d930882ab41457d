"""`RankSubset`: transports among some of the world's ranks, numbered from 0."""

from __future__ import annotations

from collections.abc import Sequence

from plait.ranks.failure.failure_log import FailureLog
from plait.ranks.transport.interface import RankTransports, Transport

OUTSIDE = -1
"""The number of a rank that is not among those of a mesh."""


class RankSubset(RankTransports):
    """The `RankTransports` of the ranks `members` of `everyone`, numbered from 0 in their order."""

    def __init__(self, everyone: RankTransports, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(everyone.rank) if everyone.rank in self.members else OUTSIDE
        self.size = len(self.members)
        self.shared_results = everyone.shared_results
        self.everyone = everyone

    @property
    def uses_nccl(self) -> bool:
        """Whether CUDA tensors are sent over NCCL."""
        return self.everyone.uses_nccl

    @property
    def timeout(self) -> float | None:
        """Timeout of operations over all ranks, in seconds; None where none is set."""
        return self.everyone.timeout

    @property
    def failure_log(self) -> FailureLog | None:
        """The failure log of all ranks; None where ranks have other numbers there than in the subset."""
        return self.everyone.failure_log if self.members == tuple(range(self.size)) else None

    def connect(
        self, groups: Sequence[tuple[int, ...]], name: str, timeout: float, max_ctas: int | None = None
    ) -> Transport | None:
        """Return a transport over the group that has this rank; only the ranks of the subset call it."""
        numbered = [tuple(self.members[rank] for rank in ranks) for ranks in groups]
        return self.everyone.connect(numbered, name, timeout, max_ctas)

    def close(self) -> None:
        """Close all transports, also those over all ranks."""
        self.everyone.close()

    def forget(self) -> None:
        """Drop the connections of all transports, also of those over all ranks."""
        self.everyone.forget()
