"""Where stages live: which rank of the pipeline holds which stage.

ranks 0 1 2 3, two chunks a rank

linear  0 1 2 3            one chunk only
loop    0 1 2 3            and round again: the last stage on the last rank
        4 5 6 7
v       0 1 2 3            and back: first and last stage on the first rank,
        7 6 5 4            and the two stages in the middle side by side
"""

from __future__ import annotations

from enum import StrEnum


class Placement(StrEnum):
    """A way to deal `ranks * chunks` stages to ranks, in model order."""

    LINEAR = "linear"
    LOOP = "loop"
    V = "v"

    @property
    def goes_back(self) -> bool:
        """Whether every second chunk goes from the last rank to the first."""
        return self is Placement.V

    def rank_of(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """The rank of each stage. With one chunk a rank all three are the same."""
        there = tuple(range(ranks))
        back = there[::-1] if self.goes_back else there
        return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else there))
