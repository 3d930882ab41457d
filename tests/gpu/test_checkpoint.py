"""A checkpoint that ranks on GPUs wrote is read by a rank on the CPU, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import plait
from gpu.training import RECIPE
from parity import woven
from parity.cases import gpt2
from plait.engine import Engine
from plait.plan.plan import Plan

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

PLANS = {
    "no axis": Plan(microbatches=2, precision="fp32"),
    "tp 2": Plan(tp=2, microbatches=2, precision="fp32"),
    "pp 2, zb-v": Plan(pp=2, schedule="zb-v", microbatches=2, precision="fp32"),
    "dp 2, full": Plan(dp=2, strategy="full", microbatches=2, precision="fp32"),
}


def optimizer_of(engine: Engine) -> torch.optim.Optimizer:
    return RECIPE.make_optimizer(engine.parameter_groups(weight_decay=0.1))


def saved(plan: Plan, path: str) -> dict[str, Any]:
    """Train a step, save in the background while the next one runs, and give what was saved."""
    case = gpt2()
    engine = woven.weave(case, plan)
    optimizer = optimizer_of(engine)
    first, second = woven.shares(case, engine, 2)
    engine.forward_backward(*first)
    optimizer.step()
    optimizer.zero_grad()
    state = engine.state_dict()
    pending = plait.save(engine, optimizer, path, {"step": 1}, wait=False)
    engine.forward_backward(*second)
    optimizer.step()
    pending.wait()
    return state


@pytest.mark.parametrize("name", PLANS)
def test_written_on_gpus_and_read_on_a_cpu(gpu_ranks: GpuRanks, tmp_path: Path, name: str) -> None:
    plan, path = PLANS[name], str(tmp_path / "checkpoint")
    expected = gpu_ranks.run(saved, plan, path, ranks=plan.world)[0]
    mesh = plait.Mesh(alone=True, device="cpu")
    engine = plait.parallelize(gpt2().build(), Plan(precision="fp32"), mesh, plait.cross_entropy)
    optimizer = optimizer_of(engine)
    assert plait.load(engine, optimizer, path) == {"step": 1}
    state = engine.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in state.items())
    moments = [values["momentum_buffer"] for values in optimizer.state.values()]
    assert moments
    assert all(moment.abs().sum() > 0 for moment in moments if moment.dim() > 1)
