"""A steady step on a GPU does not make the host wait: torch raises an error where one would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from gpu.host_waits import forbid_host_waits
from parity import woven
from parity.cases import gpt2
from plait.plan.plan import Plan
from plait.ranks.accelerator import is_accelerator

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

PLANS = {
    "no axis": Plan(microbatches=2, precision="fp32"),
    "pp 2, zb-v": Plan(pp=2, schedule="zb-v", microbatches=4, precision="fp32"),
    "tp 2": Plan(tp=2, microbatches=2, precision="fp32"),
    "dp 2, full": Plan(dp=2, strategy="full", microbatches=2, precision="fp32"),
    "dp 2, full, bf16": Plan(
        dp=2, strategy="full", reduce="each", microbatches=2, precision="bf16", master_precision="fp32"
    ),
    "pp 2 x tp 2 x dp 2": Plan(pp=2, tp=2, dp=2, microbatches=2, precision="fp32"),
}


def steady_steps(plan: Plan) -> tuple[bool, bool]:
    """Whether the losses of steps without waits are finite; whether a wait is noticed on this device."""
    case = gpt2()
    engine = woven.weave(case, plan)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-3, fused=True)
    rows = woven.global_rows(plan) // plan.dp
    ((inputs, targets),) = case.batches(rows, 1, torch.float32)
    losses = []
    for number in range(4):
        if number < 2:
            losses.append(engine.forward_backward(inputs, targets))
            engine.step(optimizer, 1.0)
        else:
            with forbid_host_waits(engine.mesh.device):
                losses.append(engine.forward_backward(inputs, targets))
                engine.step(optimizer, 1.0)
        optimizer.zero_grad()
    noticed = not is_accelerator(engine.mesh.device)
    try:
        with forbid_host_waits(engine.mesh.device):
            losses[0].item()
    except RuntimeError:
        noticed = True
    return bool(torch.stack(losses).isfinite().all()), noticed


@pytest.mark.parametrize("name", PLANS)
def test_the_host_does_not_wait_for_the_gpu_in_a_steady_step(gpu_ranks: GpuRanks, name: str) -> None:
    assert set(gpu_ranks.run(steady_steps, PLANS[name], ranks=PLANS[name].world)) == {(True, True)}
    gpu_ranks.skip_on_cpu("a CPU has nothing to wait for")


def test_host_waits_are_forbidden_within_the_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(ZeroDivisionError), forbid_host_waits(torch.device("cuda")):
        modes.append(1 / 0)
    assert modes == ["error", 1]
