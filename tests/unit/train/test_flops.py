import pytest

from plait.train.flops import flops_per_token, peak_flops


def test_flops_per_token() -> None:
    # GPT-2 small: 12 · 12 · 768² = 84,934,656 weights in blocks, 38,597,376 in the head.
    expected = 6 * (84_934_656 + 38_597_376) + 12 * 12 * 768 * 1024
    assert flops_per_token(layers=12, hidden=768, vocab=50257, context=1024) == expected


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
