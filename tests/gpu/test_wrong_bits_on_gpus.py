"""Bits that flip in a GPU's memory are found by sums, and nothing else is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import plait
from plait.engine import Engine
from plait.errors import CorruptionError
from plait.plan.plan import Plan

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

PLANS = {
    "no axis": Plan(microbatches=2, precision="bf16"),
    "tp 2": Plan(tp=2, microbatches=2, precision="fp32"),
    "pp 2": Plan(pp=2, microbatches=2, precision="bf16"),
    "dp 2, optimizer": Plan(dp=2, strategy="optimizer", precision="fp32"),
    "dp 2, full": Plan(dp=2, strategy="full", precision="fp32"),
}
STEPS = 3


def engine_of(plan: Plan) -> Engine:
    """A GPT with matrices that are summed, not kept whole."""
    model = plait.models.gpt2(layers=2, hidden=64, heads=2, vocab=64, context=8)
    return plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)


def batch(engine: Engine, step: int) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's tokens of a step."""
    every = torch.randint(64, (engine.plan.dp, 4, 9), generator=torch.Generator().manual_seed(step))
    tokens = every[engine.mesh.index("dp")].to(engine.mesh.device)
    return tokens[:, :-1], tokens[:, 1:]


def flip(tensor: Tensor) -> None:
    """Flip a bit of the last byte, which torch does not count as a write."""
    tensor.data.view(-1).view(torch.uint8)[-1:] ^= 4


def is_told_of(tensor: Tensor, checks: plait.CorruptionChecks, rank: int) -> bool:
    """Whether an error names this rank where a bit of a tensor has flipped."""
    flip(tensor)
    try:
        checks.compare()
    except CorruptionError as error:
        return f"rank {rank} on host" in str(error)
    finally:
        flip(tensor)
    return False


def flips_found(plan: Plan) -> tuple[int, int]:
    """Train, and flip a bit of each kind of tensor in each step; return how many, and how many are found."""
    flips, found, engine = 0, 0, engine_of(plan)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
    with plait.CorruptionChecks(engine, optimizer) as checks:
        for step in range(STEPS):
            engine.forward_backward(*batch(engine, step))
            largest = max(engine.parameters(), key=Tensor.numel)
            gradient = largest.grad
            assert gradient is not None
            for is_updated in (False, True):
                if is_updated:
                    engine.step(optimizer, 1.0)
                moments = [one for key, one in optimizer.state.get(largest, {}).items() if key != "step"]
                for one in [largest, *moments, *([] if is_updated else [gradient])]:
                    flips += 1
                    found += is_told_of(one, checks, engine.mesh.rank)
            optimizer.zero_grad()
    return flips, found


@pytest.mark.parametrize("name", PLANS)
def test_each_flipped_bit_is_found_by_the_rank_that_has_it(gpu_ranks: GpuRanks, name: str) -> None:
    plan = PLANS[name]
    for flips, found in gpu_ranks.run(flips_found, plan, ranks=plan.world):
        assert found == flips > 0


def steps_until_found(flipped_after: int) -> tuple[int, int]:
    """Return in which step a bit that flips between two is told of, and the last good step of the error."""
    engine = engine_of(PLANS["no axis"])
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
    checks = plait.CorruptionChecks(engine, optimizer)
    for step in range(1, flipped_after + 4):
        try:
            engine.forward_backward(*batch(engine, step))
            engine.step(optimizer, 1.0)
        except CorruptionError as error:
            checks.close()
            return step, error.last_good_step
        optimizer.zero_grad()
        if step == flipped_after:
            flip(max(engine.parameters(), key=Tensor.numel))
    return 0, 0


def test_without_a_wait_of_the_host_a_flip_is_told_of_a_step_later(gpu_ranks: GpuRanks) -> None:
    ((step, good),) = gpu_ranks.run(steps_until_found, 2, ranks=1)
    assert (step, good) == (3 if gpu_ranks.device == "cpu" else 4, 1)
