"""Experts, Muon, resharding, snapshots and checks of memory on GPUs give what they give on CPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import plait
from gpu.training import RECIPE, trained
from parity import reference
from parity.cases import gpt2
from parity.norm import assert_equal
from parity.parity import compare, merged
from parity.test_experts import CASE
from parity.whole_matrices import BOUND, MUON, OTHERS, MuonOnOneRank, train, train_on_one_rank, whole_weights
from parity.woven import global_rows, shares, weave
from plait.engine import Engine
from plait.errors import CorruptionError
from plait.plan.plan import Plan

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

EXPERTS = {
    "one rank": Plan(precision="fp64"),
    "dp 2 x ep 2, full": Plan(dp=2, ep=2, strategy="full", precision="fp64"),
    "dp 4 x ep 2 x etp 2": Plan(dp=4, ep=2, etp=2, precision="fp64"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_model_with_experts_trains_as_on_one_rank(gpu_ranks: GpuRanks, name: str) -> None:
    plan = EXPERTS[name]
    outcomes = gpu_ranks.run(trained, CASE, plan, ranks=plan.world)
    compare(outcomes, reference.train(CASE, global_rows(plan), RECIPE, torch.float64), torch.float64)


def losses_of_experts(plan: Plan, steps: int) -> list[float]:
    """In bf16, of steps in which one kernel multiplies all experts."""
    sizes = {"hidden": 32, "heads": 4, "inner": 32, "layers": 2, "vocab": 32, "context": 16}
    model = plait.models.llama(**sizes, experts=4, top_k=2, shared=32)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    found = list[Tensor]()
    draw, rows = torch.Generator().manual_seed(0), 4 // plan.dp
    for _ in range(steps):
        tokens = torch.randint(32, (4, 17), generator=draw).split(rows)[engine.mesh.index("dp")]
        found.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
    return [float(one) for one in found]


@pytest.mark.parametrize("linears", [None, "float8-rowwise-gw"])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_in_bf16_compute_on_gpus_what_they_compute_on_cpus(
    gpu_ranks: GpuRanks, ep: int, linears: Any
) -> None:
    plan = Plan(dp=ep, ep=ep, precision="bf16", microbatches=2, linears=linears)
    found = gpu_ranks.run(losses_of_experts, plan, 4, ranks=ep)[0]
    on_cpu = plait.launch(losses_of_experts, plan, 4, ranks=ep, device="cpu")[0]
    assert found == pytest.approx(on_cpu, rel=2e-2)
    assert len(set(found)) == 4


def muon_in_double(engine: Engine) -> torch.optim.Optimizer:
    return plait.Muon(engine, **MUON, dtype=torch.float64, others=OTHERS)


def trained_by_muon(plan: Plan, steps: int) -> Any:
    outcome = train(gpt2(layers=2), plan, muon_in_double, steps)
    parameters = {name: value.cpu() for name, value in outcome.parameters.items()}
    return SimpleNamespace(coordinate=outcome.coordinate, layouts=outcome.layouts, parameters=parameters)


@pytest.mark.parametrize("tp", [1, 2])
def test_muon_equals_torchs_on_one_rank(gpu_ranks: GpuRanks, tp: int) -> None:
    plan, steps = Plan(dp=2, tp=tp, strategy="full", precision="fp64"), 4
    make = partial(MuonOnOneRank, divide=whole_weights, options=MUON)
    expected = train_on_one_rank(gpt2(layers=2), make, global_rows(plan), steps)
    found = gpu_ranks.run(trained_by_muon, plan, steps, ranks=plan.world)
    assert_equal(merged(found, "parameters"), expected, BOUND, "the value")


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def losses(engine: Engine, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    """Of training steps on the batches of these numbers."""
    batches = shares(gpt2(), engine, 6)
    found = []
    for number in numbers:
        found.append(float(engine.forward_backward(*batches[number])))
        optimizer.step()
        optimizer.zero_grad()
    return found


def begun(plan: Plan) -> tuple[Engine, torch.optim.Optimizer]:
    engine = weave(gpt2(), plan)
    return engine, adamw(engine.parameter_groups(weight_decay=0.1))


def moved_and_restored(folder: str) -> tuple[list[float], list[float]]:
    """Losses of an undisturbed run, and of one that is moved to another plan and restored there."""
    sharded, divided = (
        Plan(dp=2, strategy="full", precision="fp64"),
        Plan(tp=2, microbatches=2, precision="fp64"),
    )
    expected = losses(*begun(sharded), range(6))
    engine, optimizer = begun(sharded)
    found = losses(engine, optimizer, range(2))
    engine, optimizer = plait.reshard(engine, optimizer, divided, plait.Mesh(divided))  # type: ignore[assignment]
    snapshots = plait.Snapshots(engine, optimizer, every=1, name="moved", folder=folder)
    found += losses(engine, optimizer, range(2, 4))
    snapshots.step(4)
    losses(engine, optimizer, range(4, 6))
    snapshots.finish()
    snapshots.release()
    again = begun(divided)
    with plait.Snapshots(*again, every=1, name="moved", folder=folder) as snapshots:
        assert snapshots.restore() is not None
    return expected, found + losses(*again, range(4, 6))


def test_a_run_is_moved_and_restored_from_memory(gpu_ranks: GpuRanks, tmp_path: Path) -> None:
    for expected, found in gpu_ranks.run(moved_and_restored, str(tmp_path), ranks=2):
        assert found == pytest.approx(expected, rel=1e-12)


def flipped_between_steps() -> None:
    engine, optimizer = begun(Plan(tp=2, precision="fp64"))
    with plait.CorruptionChecks(engine, optimizer):
        losses(engine, optimizer, range(2))
        if engine.mesh.rank == 1:
            next(iter(engine.parameters())).data.view(torch.uint8).flatten()[5].bitwise_xor_(1)
        losses(engine, optimizer, range(2, 4))


def test_a_flipped_bit_is_found_with_its_rank(gpu_ranks: GpuRanks) -> None:
    with pytest.raises(
        CorruptionError, match=r"rank 1 .* embedding.token.weight changed in memory by one bit"
    ):
        gpu_ranks.run(flipped_between_steps, ranks=2)
