import math

import pytest
import torch

from plait.app.config.model_section import ModelConfig
from plait.app.loop.meter import Meter, StepMetrics, StepTensors, flops_per_token
from plait.app.train.trainer import build_model
from plait.estimate.prediction.prediction import predict
from plait.estimate.time.hardware import load_hardware
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan
from plait.ranks import Mesh
from plait.ranks.launch.rank_pool import RankPool

SIZES = Decoder(layers=2, hidden=64, heads=4, vocab=100, context=32)
BUNDLED = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA B200": "b200-sxm",
}
"""The files of predictions by the names of GPUs."""


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


def test_mfu_and_predictions_divide_by_the_same_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default fp32 is that of the plain units; MFU takes TF32's where torch is set to round to it."""
    monkeypatch.setattr("plait.app.loop.meter.is_accelerator", lambda _: True)
    for device, file in [
        *BUNDLED.items(),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA GH200", "h100-sxm"),
    ]:
        monkeypatch.setattr("plait.app.loop.meter.name_of", lambda _, device=device: device)
        for precision in ("fp64", "fp32", "bf16", "fp16"):
            predicted = predict(SIZES, Plan(precision=precision), file)
            peak = SIZES.operations_per_token * predicted.tokens_per_second / predicted.mfu
            assert Meter(Mesh(), precision, 1.0)._peak == pytest.approx(peak), (device, precision)
        in_float8 = Meter(Mesh(), "bf16", 1.0, "float8")._peak
        assert in_float8 == load_hardware(file).peak.get("fp8"), "A100 has none"
        try:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            assert Meter(Mesh(), None, 1.0)._peak == load_hardware(file).peak["tf32"]
        finally:
            torch.backends.cuda.matmul.fp32_precision = "ieee"
    monkeypatch.setattr("plait.app.loop.meter.name_of", lambda _: "something new")
    assert Meter(Mesh(), "bf16", 1.0)._peak is None


def _step_numbers() -> StepMetrics:
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
        6, StepTensors(two, norm, two, bad), 0.1, tokens=10, data_seconds=mesh.rank / 8, signal=signal
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
