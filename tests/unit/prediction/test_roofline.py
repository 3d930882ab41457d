from dataclasses import replace

import pytest

from plait.prediction.hardware import load_hardware
from plait.prediction.operations import Elementwise, FusedAttention, Product
from plait.prediction.roofline import TILES, operation_seconds, product_efficiency

HARDWARE = load_hardware("a100-80")
PART = HARDWARE.efficiency


def seconds(operation: Product | Elementwise | FusedAttention) -> float:
    return operation_seconds(operation, HARDWARE, "bf16", 2)


def test_a_wave_of_full_tiles_is_limited_by_the_sum_alone() -> None:
    height, width, _ = TILES[0]
    full = Product(height * HARDWARE.multiprocessors, width, 8192)
    assert product_efficiency(full, HARDWARE) == pytest.approx(8192 / (8192 + PART.half_depth))


def test_one_tile_more_than_a_wave_costs_a_second_wave() -> None:
    height, width, _ = TILES[0]
    full = product_efficiency(Product(height, width, 4096, batch=10 * HARDWARE.multiprocessors), HARDWARE)
    more = product_efficiency(Product(height, width, 4096, batch=10 * HARDWARE.multiprocessors + 1), HARDWARE)
    assert 10 / 11 * full <= more < full


def test_short_sums_and_small_results_are_less_efficient() -> None:
    large = product_efficiency(Product(8192, 8192, 8192), HARDWARE)
    assert product_efficiency(Product(8192, 8192, 64), HARDWARE) < large
    assert product_efficiency(Product(64, 64, 8192), HARDWARE) < large / 10


def test_a_thin_product_takes_the_time_of_its_bytes() -> None:
    nbytes = 2 * (65536 * 4096 + 16 * (65536 + 4096))
    rate = HARDWARE.memory_bandwidth * PART.memory
    assert seconds(Product(16, 65536, 4096)) == pytest.approx(nbytes / rate + PART.kernel, rel=1e-3)


def test_elementwise_work_takes_the_time_of_its_bytes_and_kernels() -> None:
    rate = HARDWARE.memory_bandwidth * PART.memory
    assert seconds(Elementwise(1e9, 2)) == pytest.approx(1e9 / rate + 2 * PART.kernel)


def test_layers_may_reach_less_of_the_bandwidth_than_the_optimizer() -> None:
    half = replace(HARDWARE, efficiency=replace(PART, elementwise=0.5, kernel=0.0))
    whole = replace(half, efficiency=replace(PART, kernel=0.0))
    slow, quick = (operation_seconds(Elementwise(1e9), one, "bf16", 2) for one in (half, whole))
    assert slow == pytest.approx(2 * quick)


def test_attention_backward_does_two_and_a_half_times_the_work() -> None:
    forward = FusedAttention(1, 8, 8, 128, 4096, 4096, 0.5)
    backward = FusedAttention(1, 8, 8, 128, 4096, 4096, 0.5, backward=True)
    first, second = seconds(forward) - PART.kernel, seconds(backward) - 3 * PART.kernel
    assert second / first == pytest.approx(2.5 * PART.attention / PART.attention_backward)


def test_on_a_cpu_products_wait_for_their_bytes_and_activations_compute() -> None:
    part = replace(PART, operands=0.2, activation=0.1)
    cpu = replace(HARDWARE, multiprocessors=0, overlaps=False, efficiency=part)
    product, bandwidth = Product(64, 64, 4096), HARDWARE.memory_bandwidth * PART.memory
    computing = 2 * 64 * 64 * 4096 / (HARDWARE.peak["bf16"] * PART.product * product_efficiency(product, cpu))
    moving = 2 * (2 * 64 * 4096 + 64 * 64) / (0.2 * bandwidth)
    found = operation_seconds(product, cpu, "bf16", 2)
    assert found == pytest.approx(computing + moving + PART.kernel)
    activation = operation_seconds(Elementwise(1e9, activation=True), cpu, "bf16", 2)
    assert activation == pytest.approx(1e9 / (0.1 * bandwidth) + PART.kernel)


def test_on_a_cpu_no_product_is_cut_into_tiles() -> None:
    cpu = replace(HARDWARE, multiprocessors=0)
    assert product_efficiency(Product(3, 70, 4096), cpu) == 4096 / (4096 + PART.half_depth)
