"""Seconds of operations beside their formulas, on a device of round figures."""

from dataclasses import replace

import pytest

from plait.estimate.time.hardware import load_hardware
from plait.estimate.time.operation_times import (
    TILES,
    DeviceOperation,
    Elementwise,
    FusedAttention,
    Product,
    operation_seconds,
    product_efficiency,
)

MEASURED = load_hardware("a100-80")
PART = replace(
    MEASURED.efficiency,
    product=0.5,
    half_depth=100.0,
    attention=0.25,
    attention_backward=0.2,
    memory=0.5,
    operands=0.25,
    elementwise=0.8,
    activation=0.4,
    kernel=7.0,
)
GPU = replace(MEASURED, memory_bandwidth=2000.0, peak={"fp8": 4000.0, "bf16": 1600.0}, efficiency=PART)
"""Memory gives 1000 bytes a second, attention 400 operations a second, its backward 320."""
CPU = replace(GPU, multiprocessors=0, overlaps=False)


def seconds(operation: DeviceOperation, precision: str = "bf16", item: int = 2) -> float:
    return operation_seconds(operation, GPU, precision, item)


def test_elementwise_work_takes_the_time_of_its_bytes_and_kernels() -> None:
    assert seconds(Elementwise(4000.0, 3)) == 4000 / 800 + 3 * 7
    assert seconds(Elementwise(4000.0, activation=True)) == 4000 / 400 + 7


def test_attention_computes_two_products_and_its_backward_five_in_bf16() -> None:
    for precision in ["bf16", "fp8"]:
        forward = FusedAttention(rows=2, heads=3, key_heads=1, width=16, queries=10, keys=20, seen=0.5)
        backward = replace(forward, backward=True)
        one = 2 * 2 * 3 * 10 * 20 * 0.5 * 16  # operations of a product
        assert seconds(forward, precision) == pytest.approx(2 * one / 400 + 7, rel=1e-12)
        assert seconds(backward, precision) == pytest.approx(5 * one / 320 + 3 * 7, rel=1e-12)


def test_a_product_takes_the_longer_of_its_arithmetic_and_its_bytes_and_on_a_cpu_both() -> None:
    many = Product(30, 50, 300, batch=4)
    computing = 2 * 4 * 30 * 50 * 300 / (1600 * 0.5 * 300 / (300 + 100))
    moving = 4 * ((30 + 50) * 300 * 2 + 30 * 50 * 2) / (1000 * 0.25)
    alone, both = (operation_seconds(many, one, "bf16", 2) for one in (replace(CPU, overlaps=True), CPU))
    assert (alone, both) == pytest.approx((computing + 7, computing + moving + 7), rel=1e-12)
    thin = Product(1, 50, 1000, result_bytes=8)
    moving = ((1 + 50) * 1000 * 4 + 1 * 50 * 8) / (1000 * 0.25)
    assert operation_seconds(thin, replace(CPU, overlaps=True), "bf16", 4) == pytest.approx(moving + 7)
    large = Product(8192, 8192, 8192)
    rate = 1600 * 0.5 * product_efficiency(large, GPU)
    assert seconds(large) == pytest.approx(2 * 8192**3 / rate + 7, rel=1e-12)


def test_a_product_in_float8_has_its_own_peak_and_operands_of_one_byte() -> None:
    wide, thin = Product(30, 50, 300), Product(1, 50, 1000, result_bytes=8)
    eight = replace(CPU, overlaps=True)
    computing = 2 * 30 * 50 * 300 / (4000 * 0.5 * 300 / (300 + 100))
    moving = ((30 + 50) * 300 * 1 + 30 * 50 * 2) / (1000 * 0.25)
    found = operation_seconds(replace(wide, in_float8=True), eight, "bf16", 2)
    assert found == pytest.approx(max(computing, moving) + 7, rel=1e-12)
    moving = ((1 + 50) * 1000 * 1 + 1 * 50 * 8) / (1000 * 0.25)
    assert operation_seconds(replace(thin, in_float8=True), eight, "fp32", 4) == pytest.approx(moving + 7)


def test_results_are_computed_in_waves_of_tiles_of_the_best_size() -> None:
    """108 multiprocessors compute a tile each; the part that is not full, and the last wave, are lost."""
    deep, depth = 4096, 4096 / (4096 + 100)
    height, width, _ = TILES[0]
    for product, expected in (
        (Product(height * 108, width, deep), 1.0),
        (Product(width * 108, height, deep), 1.0),
        (Product(height, width, deep, batch=1081), 1081 / (11 * 108)),
        (Product(height, width, deep, batch=109), 0.93 * 218 / (3 * 108)),  # twice as many halves
        (Product(128, 64, deep, batch=108), 0.75),
        (Product(64, 64, deep), 0.6 / 108),
        (Product(65, 64, deep), 0.6 * 65 / 64 / 108),
        (Product(3, 70, deep), 0.6 * 3 * 70 / (64 * 64) / 108),
    ):
        assert product_efficiency(product, GPU) == pytest.approx(depth * expected, rel=1e-3), product
    assert product_efficiency(Product(3, 70, deep), CPU) == depth
