import math

import pytest
import torch

from plait.comm import Mesh
from plait.comm.rank_pool import RankPool
from plait.loop.meter import Meter, StepNumbers, StepResult, flops_per_token, peak_flops
from plait.train.build import build_model
from plait.train.config_sections import ModelConfig


def test_flops_per_token_of_gpt2_are_those_of_the_formula() -> None:
    # GPT-2 small: 12 · 12 · 768² = 84,934,656 weights in blocks, 38,597,376 in the head.
    expected = 6 * (84_934_656 + 38_597_376) + 12 * 12 * 768 * 1024
    for tied in (True, False):
        model = build_model(ModelConfig(layers=12, hidden=768, heads=12, tied=tied), 50257)
        assert flops_per_token(model, layers=12, hidden=768, context=1024) == expected


def test_flops_per_token_of_llama_are_those_of_the_formula() -> None:
    shape = ModelConfig(name="llama", layers=2, hidden=64, heads=8, kv_heads=2, inner=96)
    attention = 2 * 64 * 64 + 2 * 64 * 16
    weights = 2 * (attention + 3 * 64 * 96) + 100 * 64
    flops = flops_per_token(build_model(shape, 100), layers=2, hidden=64, context=32)
    assert flops == 6 * weights + 12 * 2 * 64 * 32


PEAKS = {
    "NVIDIA B200": (2250, 75),
    "NVIDIA H100 80GB HBM3": (989, 67),
    "NVIDIA H100 PCIe": (756, 51),
    "NVIDIA H100 NVL": (835, 60),
    "NVIDIA GH200 480GB": (989, 67),
    "NVIDIA H200": (989, 67),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "NVIDIA A10G": (125, 31.2),
    "NVIDIA L40S": (362, 91.6),
    "NVIDIA L40": (181, 90.5),
    "NVIDIA L4": (121, 30.3),
    "nvidia geforce rtx 4090": (165, 82.6),
}
"""In 1e12 operations a second: of bf16 and fp32."""


def test_the_peak_flops_of_known_gpus_are_listed_by_precision() -> None:
    for device, (bf16, fp32) in PEAKS.items():
        assert (peak_flops(device, "bf16"), peak_flops(device, "fp32")) == (bf16 * 1e12, fp32 * 1e12), device
        assert peak_flops(device, "fp64") is None
    assert peak_flops("something new", "bf16") is None


def _step_numbers() -> StepNumbers:
    mesh = Mesh(pp=2, dp=2)
    meter = Meter(mesh, None, flops_per_token=30.0)
    meter._peak = 4e3  # as if the device were known
    meter._began -= 1000 * mesh.rank
    mesh.traffic.record_wait("dp", 0, 5_000_000)  # before the step
    meter.start()
    mesh.traffic.record_wait("dp", 0, (mesh.rank + 1) * 1_000_000)
    bad = torch.tensor([mesh.rank == 3, mesh.rank in (1, 2)])
    signal = 15 if mesh.rank == 2 else 0
    two = torch.tensor(2.0)
    norm = torch.tensor(math.nan) if mesh.rank == 2 else two
    return meter.measure(
        6, StepResult(two, norm, two, bad), 0.1, tokens=10, data_seconds=mesh.rank / 8, signal=signal
    )()


def test_a_step_measures_numbers_of_each_rank_and_of_all(thread_ranks: RankPool) -> None:
    for numbers in thread_ranks.run(_step_numbers, ranks=4):
        assert numbers.blocked_seconds == pytest.approx((0.001, 0.002, 0.003, 0.004))
        assert (numbers.signal, numbers.loss_rank, numbers.gradient_rank) == (15, 3, 1)
        assert numbers.norm_ranks == (2,)
        assert len(numbers.peak_memory) == 4
        seconds = numbers.row["step_seconds"]
        assert numbers.row == {
            **{"step": 7, "loss": 2.0, "grad_norm": numbers.row["grad_norm"], "lr": 0.1, "tokens": 10},
            **{"trained_tokens": 2, "step_seconds": seconds, "data_seconds": 0.375},
            "tokens_per_second": 10 / seconds,
            "peak_memory_bytes": max(numbers.peak_memory),
            "mfu": pytest.approx(30 * 10 / seconds / 4e3),
        }
        assert seconds > 0
        assert 0 <= numbers.clock < 1000, "that of rank 0"
    assert Meter(Mesh(), "bf16", flops_per_token=1.0)._peak is None, "of a CPU nothing is known"
