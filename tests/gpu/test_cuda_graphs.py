"""Steps whose segments are CUDA graphs equal plain PyTorch on one CPU, and do not make the host wait.

On CPUs recorded operations take the place of graphs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import plait
from gpu.host_waits import forbid_host_waits
from gpu.training import on_cpu
from parity import reference, woven
from parity.case import SEED, Case, Recipe
from parity.cases import gpt2
from parity.dropping import DROPPING, by_hand
from parity.outcome import Outcome
from parity.parity import compare
from parity.recorded_steps import graphs_of
from parity.repeated_operations import OperationRecorder
from parity.woven import global_rows
from plait.engine import Engine
from plait.engine.cuda_graphs.replay_check import ReplayCheck
from plait.engine.cuda_graphs.segment_graphs import GraphCounts
from plait.engine.parallelize import build_engine
from plait.plan.plan import Plan
from plait.ranks.accelerator import is_accelerator

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

RECIPE = Recipe(steps=5, optimizer="sgd")
"""Two eager steps, one that is recorded, and two that are replayed."""
make = partial(Plan, microbatches=4, precision="fp64", cuda_graphs=True)
PLANS = {
    "no axis": make(),
    "recompute selective": make(recompute="selective"),
    "recompute full": make(recompute="full"),
    "compiled": make(compile=True),
    "pp 2, 1f1b": make(pp=2),
    "pp 2, zb-v": make(pp=2, schedule="zb-v"),
    "dp 2, full": make(dp=2, strategy="full"),
    "pp 2 x dp 2, zb-h1, each": make(pp=2, dp=2, schedule="zb-h1", strategy="full", reduce="each"),
}
ON_CPU = [name for name, plan in PLANS.items() if not plan.compile]
"""Recorded operations do not see what generated code computes."""


def recording_engine(case: Case, plan: Plan) -> Engine:
    """An engine that records CUDA graphs; on a CPU operations."""
    engine = build_engine(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    if not is_accelerator(engine.mesh.device):
        engine._runner.record_segments(OperationRecorder())
    return engine


def trained(case: Case, plan: Plan) -> tuple[Outcome, GraphCounts]:
    """What the recipe gives with graphs, and how many there were."""
    engine = recording_engine(case, plan)
    return on_cpu(woven.carry_out(RECIPE, engine, case)), graphs_of(engine).counts


@pytest.mark.parametrize("name", PLANS)
def test_every_gradient_of_replayed_graphs_is_that_of_one_rank(gpu_ranks: GpuRanks, name: str) -> None:
    case, plan = gpt2(), PLANS[name]
    if name not in ON_CPU:
        gpu_ranks.skip_on_cpu("recorded operations do not see generated code")
    results = gpu_ranks.run(trained, case, plan, ranks=plan.world)
    expected = reference.train(case, global_rows(plan), RECIPE, torch.float64)
    compare([outcome for outcome, _ in results], expected, torch.float64)
    assert all(counts.replayed > counts.recorded > 0 for _, counts in results)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replayed_graphs_drop_by_the_masks_of_their_step_and_rows(
    gpu_ranks: GpuRanks, recompute: str
) -> None:
    plan = make(pp=2, recompute=recompute)
    results = gpu_ranks.run(trained, DROPPING, plan, ranks=2)
    compare([outcome for outcome, _ in results], by_hand(DROPPING, plan, RECIPE), torch.float64)


def checked(case: Case, plan: Plan) -> list[str]:
    """The differences between replayed and eager segments, in a step with another loss scale."""
    engine = recording_engine(case, plan)
    batches = woven.shares(case, engine, 4)
    for batch in batches[:3]:
        engine.forward_backward(*batch)
    graphs_of(engine).check = check = ReplayCheck(engine.runtime.units, engine.runtime.dropout)
    engine._runner.scale.value = 4.0
    engine.forward_backward(*batches[3])
    return list(map(str, check.differences))


@pytest.mark.parametrize("name", ON_CPU)
def test_the_check_finds_no_replayed_segment_that_differs(gpu_ranks: GpuRanks, name: str) -> None:
    assert not any(gpu_ranks.run(checked, gpt2(), PLANS[name], ranks=PLANS[name].world))


def steady_losses(plan: Plan) -> bool:
    """Whether the losses of steps without waits are finite."""
    case = gpt2()
    engine = recording_engine(case, plan)
    losses = []
    for number, batch in enumerate(woven.shares(case, engine, 5)):
        if number < 3:
            losses.append(engine.forward_backward(*batch))
        else:
            with forbid_host_waits(engine.mesh.device):
                losses.append(engine.forward_backward(*batch))
    return bool(torch.stack(losses).isfinite().all())


@pytest.mark.parametrize("name", ["no axis", "pp 2, zb-v", "dp 2, full"])
def test_the_host_does_not_wait_for_the_gpu_in_a_replayed_step(gpu_ranks: GpuRanks, name: str) -> None:
    assert all(gpu_ranks.run(steady_losses, PLANS[name], ranks=PLANS[name].world))
    gpu_ranks.skip_on_cpu("a CPU has nothing to wait for")
