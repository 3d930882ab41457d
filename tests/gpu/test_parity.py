"""Two steps on GPUs equal plain PyTorch on one CPU: float64, every gradient, by `parity.norm`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from gpu.training import RECIPE, trained, trained_in_a_group_with_device_id
from parity import reference
from parity.cases import gpt2
from parity.parity import compare
from parity.woven import global_rows
from plait.plan.plan import Plan

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

make = partial(Plan, microbatches=4, precision="fp64")
PLANS = {
    "no axis": make(),
    "pp 2, 1f1b": make(pp=2),
    "pp 2, zb-v": make(pp=2, schedule="zb-v"),
    "pp 2, interleaved": make(pp=2, schedule="interleaved"),
    "tp 2": make(tp=2),
    "dp 2, full": make(dp=2, strategy="full"),
    "pp 2 x tp 2": make(pp=2, tp=2),
    "pp 4, 1f1b": make(pp=4),
    "pp 2 x tp 2 x dp 2": make(pp=2, tp=2, dp=2),
    "pp 2 x tp 2 x dp 2, zb-v, full": make(pp=2, tp=2, dp=2, schedule="zb-v", strategy="full"),
}
WITH_DEVICE_ID = ("pp 2, 1f1b", "pp 2, zb-v", "tp 2", "dp 2, full", "pp 4, 1f1b", "pp 2 x tp 2 x dp 2")


@pytest.mark.parametrize("name", PLANS)
def test_every_gradient_is_that_of_one_rank(gpu_ranks: GpuRanks, name: str) -> None:
    case, plan = gpt2(), PLANS[name]
    outcomes = gpu_ranks.run(trained, case, plan, ranks=plan.world)
    compare(outcomes, reference.train(case, global_rows(plan), RECIPE, torch.float64), torch.float64)


@pytest.mark.parametrize("name", WITH_DEVICE_ID)
def test_the_same_where_the_process_group_has_a_device_id(
    gpu_ranks: GpuRanks, name: str, tmp_path: Path
) -> None:
    """NCCL then splits communicators, and messages that are not batched share one."""
    case, plan, again = gpt2(), PLANS[name], (gpu_ranks.device, str(tmp_path / "store"))
    outcomes = gpu_ranks.run(trained_in_a_group_with_device_id, case, plan, *again, ranks=plan.world)
    compare(outcomes, reference.train(case, global_rows(plan), RECIPE, torch.float64), torch.float64)
    gpu_ranks.skip_on_cpu("a process group of CPUs takes no device_id")
