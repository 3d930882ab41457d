import math

import pytest
import torch

from plait.comm import Mesh
from plait.comm.rank_pool import RankPool
from plait.loop.meter import Meter, StepNumbers, StepResult, flops_per_token, peak_flops
from plait.train.build import build_model
from plait.train.config_sections import ModelConfig


def test_flops_of_gpt2() -> None:
    # GPT-2 small: 12 · 12 · 768² = 84,934,656 weights in blocks, 38,597,376 in the head.
    expected = 6 * (84_934_656 + 38_597_376) + 12 * 12 * 768 * 1024
    for tied in (True, False):
        model = build_model(ModelConfig(layers=12, hidden=768, heads=12, tied=tied), 50257)
        assert flops_per_token(model, layers=12, hidden=768, context=1024) == expected


def test_flops_of_llama() -> None:
    shape = ModelConfig(name="llama", layers=2, hidden=64, heads=8, kv_heads=2, inner=96)
    attention = 2 * 64 * 64 + 2 * 64 * 16
    weights = 2 * (attention + 3 * 64 * 96) + 100 * 64
    flops = flops_per_token(build_model(shape, 100), layers=2, hidden=64, context=32)
    assert flops == 6 * weights + 12 * 2 * 64 * 32


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A10G", "bf16", 125e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA H100 80GB HBM3", "fp64", None),
        ("something new", "bf16", None),
    ],
)
def test_peak_of_devices(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak


def _step_numbers() -> StepNumbers:
    mesh = Mesh(pp=2, dp=2)
    meter = Meter(mesh, None)
    meter.start()
    mesh.traffic.record_wait("dp", 0, (mesh.rank + 1) * 1_000_000)
    bad = torch.tensor([mesh.rank == 3, mesh.rank in (1, 2)])
    signal = 15 if mesh.rank == 2 else 0
    two = torch.tensor(2.0)
    norm = torch.tensor(math.nan) if mesh.rank == 2 else two
    return meter.measure(6, StepResult(two, norm, two, bad), 0.1, tokens=10, signal=signal)()


def test_numbers_of_each_rank_and_of_all(thread_ranks: RankPool) -> None:
    for numbers in thread_ranks.run(_step_numbers, ranks=4):
        assert numbers.blocked_seconds == pytest.approx((0.001, 0.002, 0.003, 0.004))
        assert (numbers.signal, numbers.loss_rank, numbers.gradient_rank) == (15, 3, 1)
        assert numbers.norm_ranks == (2,)
        assert len(numbers.peak_memory) == 4
        assert numbers.row["peak_memory_bytes"] == max(numbers.peak_memory)
        assert (numbers.row["step"], numbers.row["loss"], numbers.row["tokens"]) == (7, 2.0, 10)
