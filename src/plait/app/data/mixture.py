"""Batches of several corpora, in proportions that hold in every stretch of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.app.data.batches import InputsAndTargets, Rows, joined, permute

BLOCK = 1024
"""Rows among which each corpus has its share: a weight below half a row of a block counts as none."""


@dataclass(frozen=True, eq=False)
class MixedBatches:
    """Training batches of rows of several corpora; each corpus goes through its own epochs.

    The rows of a run are taken in blocks, in which each corpus has its share of rows, in an order that the
    seed and the block give. So any batch can be made directly.
    """

    corpora: Sequence[Rows]
    weights: Sequence[float]
    """One for each, above 0; only their proportions count."""
    size: int
    seed: int

    @cached_property
    def shares(self) -> NDArray[np.int64]:
        """The rows of each corpus in a block: the weights, rounded so that they add up."""
        exact = np.array(self.weights) / sum(self.weights) * BLOCK
        shares = np.floor(exact).astype(np.int64)
        missing = BLOCK - int(shares.sum())
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
        return shares

    @property
    def rows(self) -> int:
        """The number of rows of the mixture after which the rows of some corpus repeat."""
        pairs = zip(self.corpora, map(int, self.shares), strict=True)
        return min(BLOCK * each.count // share for each, share in pairs if share)

    def epochs(self, steps: int) -> list[float]:
        """Return how many times a run of `steps` steps takes the rows of each corpus."""
        pairs = zip(self.corpora, map(int, self.shares), strict=True)
        return [steps * self.size * share / BLOCK / each.count for each, share in pairs]

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the order of rows, as JSON values."""
        return {
            "seed": self.seed,
            "rows": [each.count for each in self.corpora],
            "weights": list(self.weights),
        }

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return `rows` of the global batch of `step`, counted from 0; see `ShuffledBatches.batch`."""
        numbers = step * self.size + np.arange(self.size, dtype=np.int64)[rows]
        corpus, position = self._places(numbers)
        parts, order = [], []
        for index, each in enumerate(self.corpora):
            mine = np.nonzero(corpus == index)[0]
            if len(mine):
                epoch, within = np.divmod(position[mine], each.count)
                parts.append(each.take(permute(within, each.count, self.seed + index, epoch)))
                order.append(mine)
        return joined(parts, np.concatenate(order))

    def _places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the corpus of each row of the run, and its position among the rows of that corpus."""
        block, within = np.divmod(numbers, BLOCK)
        place = permute(within, BLOCK, self.seed, block)
        starts = np.concatenate([[0], np.cumsum(self.shares)])
        corpus = np.searchsorted(starts, place, side="right") - 1
        return corpus, block * self.shares[corpus] + place - starts[corpus]
