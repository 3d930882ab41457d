"""What all tests share: one pool of ranks for the whole session, one thread each; how examples are drawn."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from plait.comm.launch import launch
from plait.comm.pool import RankPool


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # Without the full products, examples are few and the same each time: what fails was broken by a change,
    # not drawn by bad luck. `make test-all` explores. No deadline: times are noisy, and no test asserts one.
    fixed = "not full" in config.option.markexpr
    profile = {"derandomize": True, "max_examples": 50} if fixed else {"max_examples": 100}
    hypothesis.settings.register_profile("plait", deadline=None, **profile)
    hypothesis.settings.load_profile("plait")


class ThreadPool:
    def run(self, function, *arguments, ranks=8, timeout=None):
        return launch(function, *arguments, ranks=ranks, ranks_as="threads", threads=1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers, one pool: what uses the ranks runs on one worker, in its order, all else beside it."""
    for item in items:
        if "rank_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Local CPU ranks: `rank_pool.run(function, *arguments, ranks=4)`; they start when asked for."""
    if os.environ.get("THREADS"):
        yield ThreadPool()
        return
    with RankPool(8, threads=1, timeout=60.0, device="cpu") as pool:
        yield pool
