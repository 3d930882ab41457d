"""Processes of a host that need the same code: one generates it, the others read it from torch's cache."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from clock import Clock
from torch import Tensor
from torch._dynamo.utils import counters

import plait
from plait.engine.compilation import torch_compiler as generation_lock
from plait.engine.compilation.torch_compiler import (
    generating_alone,
    joint_graph,
    with_generated_code,
    without_memory,
)
from plait.ranks import barrier


def test_a_rank_waits_for_code_generation_of_the_same_graph_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = generating_alone("a graph", tmp_path)
    first.__enter__()
    monkeypatch.setattr(
        generation_lock,
        "time",
        clock := Clock(lambda second: first.__exit__(None, None, None) if second == 20 else None),
    )
    with generating_alone("another graph", tmp_path):
        assert clock.now == 0
    with generating_alone("a graph", tmp_path):
        assert clock.now == 20
    assert not list(tmp_path.iterdir())


def test_a_process_that_generates_code_too_long_is_named_and_no_longer_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_lock, "time", clock := Clock(lambda second: None))
    match = rf"process {os.getpid()} on .+ has generated .+ for 3 seconds \({tmp_path}.+\): this rank gen"
    with (
        generating_alone("a graph", tmp_path),
        pytest.warns(UserWarning, match=match),
        generating_alone("a graph", tmp_path, patience=3),
    ):
        assert clock.now == 3
    assert not list(tmp_path.iterdir()), "the one that has the lock removes it"


def test_a_file_system_without_locks_makes_no_rank_wait(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with generating_alone("a graph", missing), generating_alone("a graph", missing):
        assert not missing.exists()


def test_an_error_releases_the_generation_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), generating_alone("a graph", tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def products(count: int, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Only products, for which no kernel has to be built."""
    for _ in range(count):
        x = x @ weight
    return (x,)


GRAPHS = 4


def counted_in_a_rank(cache: str) -> tuple[int, int]:
    """Generate the code of several graphs as the other rank does; return the hits and misses of the cache."""
    world = plait.Mesh(dp=2).group("world")
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache), torch.no_grad():
        counters.clear()
        for count in range(1, GRAPHS + 1):
            function = partial(products, count)
            with without_memory():
                examples = [torch.empty(3, 4), torch.empty(4, 4)]
            graph = joint_graph(function, examples, differentiates=False)
            barrier(world).wait()
            (made,) = with_generated_code(graph)([x, weight])
            assert torch.equal(made, function(x, weight)[0])
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.full
def test_of_two_ranks_one_generates_each_graph(rank_pool: Any, tmp_path: Path) -> None:
    """They begin each graph together, with an empty cache."""
    first, second = rank_pool.run(counted_in_a_rank, str(tmp_path), ranks=2)
    assert sum(first) == sum(second) == GRAPHS
    assert first[1] + second[1] == GRAPHS, "the other one finds it in the cache"
