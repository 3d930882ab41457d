"""What all tests share: one pool of ranks for the whole session, one thread each."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from plait.comm.pool import RankPool


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # No deadline: times are noisy, and no test asserts one.
    hypothesis.settings.register_profile("plait", deadline=None)
    hypothesis.settings.load_profile("plait")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Local CPU ranks: `rank_pool.run(function, *arguments, ranks=4)`; they start when asked for."""
    with RankPool(8, threads=1, timeout=60.0, device="cpu") as pool:
        yield pool
