"""Before the first step: what the ranks must agree on, and what precision they compute in."""

from __future__ import annotations

import io
import logging
import os
import random
import re
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import CommunicationError, ModelError
from plait.models.result_cache import ResultCache


def weave_with_seed(seeds: tuple[int, ...]) -> None:
    plan = plait.Plan(dp=2)
    mesh = plait.Mesh(plan)
    torch.manual_seed(seeds[mesh.rank])
    plait.parallelize(nn.Sequential(nn.Linear(4, 3)), plan, mesh, loss=plait.cross_entropy)


def test_ranks_that_start_from_other_values_are_refused(rank_pool):
    rank_pool.run(weave_with_seed, (1, 1), ranks=2)
    with pytest.raises(ModelError) as caught:
        rank_pool.run(weave_with_seed, (1, 2), ranks=2)
    told = (
        "the model starts from other values on rank 1 than on rank 0, first in 0.weight: give parallelize "
        "broadcast=True, and those of rank 0 count, or seed each rank alike (torch.manual_seed) before it "
        "builds the model."
    )
    assert str(caught.value) == told
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("other values on rank 1") == shown.count(told) == 1
    assert "in weave_with_seed" in shown


def weave_and_step(change: Callable[[], object], after: bool) -> str:
    """What is raised where rank 1 changes a setting of its process before or after `parallelize`."""
    plan = plait.Plan(dp=2)
    mesh, default = plait.Mesh(plan), torch.get_default_dtype()
    try:
        if mesh.rank and not after:
            change()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float32))
        engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
        if mesh.rank and after:
            change()
        engine.forward_backward(torch.ones(2, 4, dtype=torch.float32), torch.tensor([0, 1]))
        return ""
    except CommunicationError as error:
        return str(error)
    finally:
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        os.environ.pop("NCCL_ALGO", None)


SETTINGS: tuple[tuple[Callable[[], object], bool, str], ...] = (
    (lambda: None, False, "^$"),
    (lambda: torch.set_float32_matmul_precision("highest"), False, "^$"),  # as it is, but said
    (
        lambda: torch.set_float32_matmul_precision("high"),
        True,
        r"fp32_precision of matmul .* = \['ieee', 'ieee'\]; rank 1: .* = \['tf32', 'tf32'\]\)",
    ),
    (
        lambda: torch.set_default_dtype(torch.float64),
        True,
        r"get_default_dtype\(\) = torch.float32; rank 1: .* = torch.float64\)",
    ),
    (
        lambda: torch.use_deterministic_algorithms(True),
        False,
        r"algorithms_enabled\(\) = False; rank 1: .* = True\)",
    ),
    (
        lambda: os.environ.update(NCCL_ALGO="Ring"),
        False,
        r"rank 1: environment variable NCCL_ALGO = Ring\)",
    ),
)


def test_ranks_with_different_torch_settings_are_refused(rank_pool):
    for change, after, told in SETTINGS:
        for sentence in rank_pool.run(weave_and_step, change, after, ranks=2):
            assert re.search(told, sentence), sentence


class Unlike(nn.Linear):
    """Holds what is another in each process, or on each rank, and computes the same everywhere."""

    differs_by_rank = ("rank", "started")

    def __init__(self, rank: int) -> None:
        super().__init__(4, 3)
        self.rank, self.started = rank, time.time()
        self.names, self.modes = {"query", "key", "value", "output"}, frozenset(("sum", "mean", "none"))
        self.log, self.text = logging.getLogger(f"rank {rank}"), io.StringIO(f"rank {rank}")
        self.folder, self.path = f"/scratch/rank{rank}", Path(f"rank{rank}")
        self.generators = random.Random(rank), torch.Generator().manual_seed(rank)
        self.where, self.angles = torch.device("cpu", rank), ResultCache()
        self.act, self.config = lambda x: x.relu(), SimpleNamespace(sizes={"a", "b", "c"}, made=object())
        if rank:
            assert self.doubled == 8

    @cached_property
    def doubled(self) -> int:
        return 2 * self.in_features

    def forward(self, x: Tensor) -> Tensor:
        assert self.config is None or "a" in {"a", "b", "c", "d"}
        return super().forward(self.act(x))


def step_unlike(shared: nn.Module | None) -> float:
    plan = plait.Plan(dp=2)
    mesh = plait.Mesh(plan)
    torch.manual_seed(0)
    model = nn.Sequential(Unlike(mesh.rank)) if shared is None else shared
    loss = plait.tensor.mean_loss(lambda output, targets: (output - targets).square().mean(), over="targets")
    engine = plait.parallelize(model, plan, mesh, loss=loss)
    return engine.forward_backward(torch.ones(2, 4), torch.ones(2, 3)).item()


def test_object_ids_and_addresses_that_differ_between_ranks_are_accepted(rank_pool, thread_ranks):
    torch.manual_seed(0)
    shared = nn.Sequential(Unlike(0))
    assert len(
        set(rank_pool.run(step_unlike, None, ranks=2) + thread_ranks.run(step_unlike, shared, ranks=2))
    )


def first_loss(
    precision: str | None, model_dtype: torch.dtype, input_dtype: torch.dtype
) -> tuple[float, str]:
    plan = plait.Plan(pp=2, microbatches=2, precision=precision)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(model_dtype)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(input_dtype)
    loss = engine.forward_backward(inputs, torch.tensor([0, 1, 2, 0])).item()
    (dtype,) = {str(parameter.dtype) for parameter in engine.parameters()} or {""}
    return loss, dtype


def test_without_a_precision_the_model_keeps_its_own(thread_ranks):
    kept = thread_ranks.run(first_loss, None, torch.float64, torch.float64, ranks=2)
    given = thread_ranks.run(first_loss, "fp64", torch.float64, torch.float64, ranks=2)
    assert kept == given
    assert kept[0][1] == "torch.float64"


def test_inputs_are_brought_to_the_precision(thread_ranks):
    (loss, dtype), _ = thread_ranks.run(first_loss, "fp64", torch.float32, torch.float32, ranks=2)
    assert dtype == "torch.float64"
    (single, dtype), _ = thread_ranks.run(first_loss, "fp32", torch.float32, torch.float64, ranks=2)
    assert dtype == "torch.float32"
    assert loss == pytest.approx(single, rel=1e-6)
