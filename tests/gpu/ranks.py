"""The ranks of the tests marked `gpu`: GPUs with NCCL, each or shared, or CPUs with Gloo to try the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.ranks.accelerator import visible_accelerators
from plait.ranks.launch.rank_pool import RankPool

MOST_RANKS = 8
SECONDS = 120.0
"""That a run may take, and a rank may wait."""


class GpuRanks:
    """A pool of ranks, asked as a `RankPool` is; a test that needs more of them than there are is skipped."""

    def __init__(self, asked: str) -> None:
        """`asked`: the option `--gpu-tests-on`; of CUDA with the number of ranks that share a GPU."""
        self.device, _, count = asked.partition(":")
        assert self.device in ("cuda", "cpu"), f"--gpu-tests-on is {asked!r}: give cuda, cpu or either:RANKS"
        self.most_per_gpu = int(count or 1) if self.device == "cuda" else 1
        on_gpus = visible_accelerators() * self.most_per_gpu
        self.available = on_gpus if self.device == "cuda" else int(count or MOST_RANKS)
        self._pool = RankPool(
            MOST_RANKS, threads=1, timeout=SECONDS, device=self.device, ranks_per_gpu=self.most_per_gpu
        )

    def require(self, ranks: int) -> None:
        """Skip the test if there are fewer."""
        if ranks > self.available:
            kind = "GPUs" if self.device == "cuda" else "CPU ranks"
            pytest.skip(f"needs {ranks} {kind}, and there are {self.available}")

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """Return what `function(*arguments)` returns on each rank; on the CPU, for tensors."""
        self.require(ranks)
        return self._pool.run(function, *arguments, ranks=ranks)

    def skip_on_cpu(self, reason: str) -> None:
        """Say so where the test has run on CPUs, which cannot show what it is about."""
        if self.device == "cpu":
            pytest.skip(f"ran through, but {reason}")

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
