"""Before the first step: what the ranks must agree on, and what precision they compute in."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import nn

import plait
from plait.errors import CommunicationError, ModelError


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
    (
        lambda: torch.set_float32_matmul_precision("high"),
        True,
        r"matmul_precision\(\) = highest; rank 1: .* = high\)",
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


def test_other_settings_of_a_process_are_refused(rank_pool):
    for change, after, told in SETTINGS:
        for sentence in rank_pool.run(weave_and_step, change, after, ranks=2):
            assert re.search(told, sentence), sentence


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
