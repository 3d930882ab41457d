"""The ranks that tests marked `gpu` ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks


@pytest.fixture(scope="session")
def gpu_ranks(request: pytest.FixtureRequest) -> Iterator[GpuRanks]:
    """`gpu_ranks.run(function, *arguments, ranks=2)`: on GPUs, or where `--gpu-tests-on` says."""
    from gpu.ranks import GpuRanks

    ranks = GpuRanks(request.config.getoption("--gpu-tests-on"))
    yield ranks
    ranks.close()
