"""The end of a step beside formulas, where each link and the memory have round figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.hardware import Hardware, Link, load_hardware
from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.step_times import (
    StepEndSizes,
    gradient_sum_seconds,
    gradient_transfers,
    latest_ends,
    optimizer_seconds,
    step_seconds,
)
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

H100 = load_hardware("h100-sxm")
PART = replace(H100.efficiency, memory=0.5, optimizer=0.8, collective=7.0, inside=0.5, across=0.5)
HARDWARE = replace(
    H100,
    devices=4,
    memory_bandwidth=1000.0,
    inside=Link(bandwidth=200.0, latency=0.0),
    across=Link(bandwidth=40.0, latency=0.0),
    efficiency=PART,
)
"""A rank sends 100 bytes a second inside a host, four of a host send 80 across; optimizers move 400."""
DECODER = Decoder(layers=1, hidden=96, heads=6, vocab=510, context=64)
MIXED = {"precision": "bf16", "master_precision": "fp32"}


def timer(hardware: Hardware = HARDWARE, **fields: Any) -> LayerTimer:
    shape = MicrobatchShape(DECODER, Plan(**{**MIXED, **fields}), rows=1)
    return LayerTimer(shape, hardware, "bf16")


def test_gradients_are_summed_by_the_strategys_collectives() -> None:
    for fields, expected in [
        ({"dp": 4}, 2 * 4000 * 3 / 4 / 100 + 3 * 7),  # 1000 parameters of three layers, in fp32
        ({"dp": 4, "gradient_precision": "bf16"}, 2 * 2000 * 3 / 4 / 100 + 3 * 7),
        ({"dp": 4, "reduce_precision": "bf16"}, 2 * 2000 * 3 / 4 / 100 + 3 * 7),
        ({"dp": 4, "strategy": "optimizer"}, 4000 * 3 / 4 / 100 + 3 * 7),
        ({"dp": 4, "strategy": "full", "reduce": "last"}, 4000 * 3 / 4 / 100 + 3 * 7),
        ({"dp": 4, "strategy": "full", "reduce": "each"}, 0),
        ({"dp": 4, "strategy": "gradients", "reduce": "each"}, 0),
        (
            {"dp": 8, "replicate": 2, "strategy": "optimizer"},  # shards of four ranks, summed across hosts
            4000 * 3 / 4 / 100 + 3 * 7 + 2 * 4000 / 4 / 2 / 20 + 3 * 7,
        ),
        ({"dp": 2, "cp": 2}, 2 * 4000 * 3 / 4 / 100 + 3 * 7),
        ({}, 0),
    ]:
        assert gradient_transfers(timer(**fields), 1000.0, 3) == pytest.approx(expected, rel=1e-12)


def test_sums_are_hidden_by_the_last_backward_but_for_those_of_its_last_layer() -> None:
    sums = 2 * 4000 * 3 / 4 / 100 + 4 * 7
    for window, left in ((0.0, sums), (40.0, sums - 40 * 3 / 4), (1e6, sums / 4)):
        work = StepEndSizes(1000.0, 4, window)
        assert gradient_sum_seconds(timer(dp=4), work) == pytest.approx(left, rel=1e-12)
        shown = timer(replace(HARDWARE, overlaps=False), dp=4)
        assert gradient_sum_seconds(shown, work) == pytest.approx(sums, rel=1e-12)


GRADIENT, MOMENTS = 2 * 4, 2 * 2 * 4  # bytes of a parameter: read twice; read and written


def test_the_optimizer_reads_and_writes_its_state_and_gathers_parameters() -> None:
    for fields, nbytes, gathers in [
        (
            {"dp": 4},
            GRADIENT + MOMENTS + 2 * 4 + 2,
            0,
        ),  # masters are read and written, and parameters written
        ({"dp": 4, "strategy": "optimizer"}, (GRADIENT + MOMENTS + 2 * 4 + 2) / 4, 2000 * 3 / 4 / 100 + 14),
        ({"dp": 4, "strategy": "gradients"}, (GRADIENT + MOMENTS + 2 * 4 + 2) / 4, 2000 * 3 / 4 / 100 + 14),
        ({"dp": 4, "strategy": "full"}, (GRADIENT + MOMENTS + 2 * 4 + 2) / 4, 0),
        ({"dp": 4, "replicate": 2, "strategy": "full"}, (GRADIENT + MOMENTS + 2 * 4 + 2) / 2, 0),
        ({"master_precision": "bf16"}, (2 + 2 * (1 + 2)) * 2, 0),
        ({"precision": None, "master_precision": None}, (2 + 2 * (1 + 2)) * 4, 0),
        ({"gradient_precision": "bf16"}, 2 * 2 + MOMENTS + 2 * 4 + 2, 0),
    ]:
        found = optimizer_seconds(timer(**fields), 1000.0, 2)
        assert found == pytest.approx((1000 * nbytes / 400, gathers), rel=1e-12)


def test_gradients_and_state_of_experts_are_those_of_the_ranks_with_the_same_ones() -> None:
    """Of 1000 parameters 600 of experts: on two of four ranks each, or shards of them."""
    sums = 2 * 4 * (400 * 3 / 4 + 600 / 2) / 100 + 2 * 3 * 7
    assert gradient_transfers(timer(dp=4, ep=2), 1000.0, 3, 600.0) == pytest.approx(sums, rel=1e-12)
    made = timer(dp=4, ep=2, strategy="optimizer")
    sums = 4 * (400 * 3 / 4 + 600 / 2) / 100 + 2 * 3 * 7
    assert gradient_transfers(made, 1000.0, 3, 600.0) == pytest.approx(sums, rel=1e-12)
    nbytes, gathers = GRADIENT + MOMENTS + 2 * 4 + 2, 2 * (400 * 3 / 4 + 600 / 2) / 100 + 2 * 14
    found = optimizer_seconds(made, 1000.0, 2, 600.0)
    assert found == pytest.approx(((400 / 4 + 600 / 2) * nbytes / 400, gathers), rel=1e-12)
    alone = timer(dp=4, ep=4, strategy="optimizer")  # each rank has its experts for itself
    assert gradient_transfers(alone, 600.0, 3, 600.0) == 0


def test_a_step_ends_when_the_last_rank_has_its_sums_and_the_slowest_its_optimizer() -> None:
    works = [StepEndSizes(1000.0, 2, 0.0), StepEndSizes(4000.0, 4, 0.0), StepEndSizes(1000.0, 2, 0.0)]
    latest = latest_ends(works, [300.0, 100.0, 500.0])
    assert latest == {works[0]: 500.0, works[1]: 100.0}
    made = timer(dp=4, strategy="optimizer")
    ends = [end + gradient_sum_seconds(made, work) for work, end in latest.items()]
    assert ends == [500 + 30 + 14, 100 + 120 + 28]
    assert step_seconds(made, latest) == 544 + sum(optimizer_seconds(made, 4000.0, 4))
