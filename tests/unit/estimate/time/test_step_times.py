"""Steps of a pipeline of two, counted by hand where every kernel takes a second and a message six."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from one_second_kernels import DECODER, HARDWARE

from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.hardware import Hardware, Link
from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.step_times import stage_kinds, stage_modes
from plait.plan.plan import Plan

GPIPE = Plan(pp=2, microbatches=2, schedule="gpipe", layers_per_stage=(2, 2), overlap=True, precision="bf16")
"""Forward and backward take 8 and 14 seconds on the first stage, 12 and 16 on the last."""
FIRST = {"matrix products": 12, "attention": 8, "element-wise": 24}


def predicted(hardware: Hardware = HARDWARE, **fields: Any) -> Prediction:
    return predict(DECODER, replace(GPIPE, **fields), hardware)


def test_ranks_end_when_their_last_action_does() -> None:
    for found, ends, pp in [
        # The last rank waits for the first forward; the first one for both backwards of the last.
        (predicted(), (8 + 6 + 2 * 12 + 2 * 16 + 6 + 14, 8 + 6 + 2 * 12 + 2 * 16), 12),
        # Its first input gradient, of 12 of the 16 seconds, is sent before the weight gradient.
        (predicted(overlap=None), (8 + 6 + 24 + 16 + 12 + 6 + 14, 70), 12),
        (predicted(schedule="1f1b"), (8 + 6 + 12 + 16 + 12 + 16 + 6 + 14, 70), 12),
    ]:
        assert found.times.ends == pytest.approx(ends, rel=1e-9)
        assert found.step_seconds == pytest.approx(max(ends))
        spent = {name: seconds for name, seconds in found.breakdown.items() if seconds > 1e-6}
        bubble = max(ends) - 2 * 22 - pp
        assert spent == pytest.approx({**FIRST, "pp communication": pp, "bubble": bubble})
        assert found.timeline.makespan == pytest.approx(max(ends) * 1e9)
        assert found.bound == ("bubble" if bubble > pp else "pp communication")


def test_stages_take_the_layers_in_order() -> None:
    assert stage_kinds(DECODER.kinds, (1, 2, 1)) == (("embedding",), ("attention", "mlp"), ("head",))


def test_stages_have_the_modes_of_their_own_layers() -> None:
    modes = ("full", "none", "selective", "none")
    plan = replace(GPIPE, recompute=modes, layers_per_stage=(1, 3))
    assert stage_modes(plan, (1, 3)) == (("full",), ("none", "selective", "none"))
    assert stage_modes(replace(plan, recompute="full"), (1, 3)) == (("full",), ("full",) * 3)
    found = predict(DECODER, plan, HARDWARE)
    timer = LayerTimer(MicrobatchShape(DECODER, plan, 1), HARDWARE, "bf16")
    last = [
        timer.times(kind, mode) for kind, mode in zip(("attention", "mlp", "head"), modes[1:], strict=True)
    ]  # type: ignore[arg-type]
    assert found.times.passes == (timer.times("embedding", "full"), last[0] + last[1] + last[2])
    kept, again = (predict(DECODER, replace(GPIPE, recompute=one), HARDWARE) for one in ("none", "full"))
    both = predict(DECODER, replace(GPIPE, recompute=("full", "full", "none", "none")), HARDWARE)
    assert both.memory == (again.memory[0], kept.memory[1])
    assert both.hfu == pytest.approx(
        both.mfu * (1 + sum(DECODER.layer_costs[:2]) / sum(DECODER.layer_costs) / 3)
    )
    assert again.hfu == pytest.approx(again.mfu * 4 / 3)
    assert kept.hfu == kept.mfu


def test_the_last_ranks_breakdown_has_sums_gathers_and_the_optimizer_of_the_slowest() -> None:
    """The first stage has the table of positions, so its sums take longer and so does its optimizer."""
    slow = replace(HARDWARE, inside=Link(1e3, 1.0), across=Link(1e3, 1.0), memory_bandwidth=1e6)
    fields = {"dp": 2, "strategy": "optimizer", "schedule": "1f1b"}
    found = predicted(hardware=slow, **fields)
    works = found.times.work
    assert [work.layers for work in works] == [2, 2]
    assert [work.window for work in works] == [one.backward for one in found.times.passes]
    assert works[0].parameters == DECODER.parameters_of(DECODER.kinds[:2])
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds, rel=1e-12)
    assert found.breakdown["dp communication"] > found.breakdown["optimizer"] > 0
    equal = predicted(hardware=slow, layers_per_stage=None, pp=1, **{**fields, "schedule": "gpipe"})
    (passes,) = equal.times.passes
    assert equal.times.ends == pytest.approx([2 * passes.total.total])
    assert equal.breakdown["bubble"] == pytest.approx(0, abs=1e-6)


def test_a_message_has_the_activation_or_the_ranks_shard() -> None:
    for fields, parts in [
        ({}, 1),
        ({"tp": 2}, 1),
        ({"tp": 2, "sequence_parallel": "keep"}, 2),
        ({"cp": 2}, 2),
    ]:
        slow = replace(HARDWARE, inside=Link(10.0, 1.0), efficiency=replace(HARDWARE.efficiency, inside=0.5))
        for pp, expected in ((1, 0), (2, 6 + 64 * 96 * 2 / parts / 5)):
            plan = replace(GPIPE, pp=pp, layers_per_stage=None, **fields)
            timer = LayerTimer(MicrobatchShape(DECODER, plan, rows=1), slow, "bf16")
            assert timer.message_seconds == pytest.approx(expected)


def test_ranks_that_share_cores_are_faster_while_others_wait() -> None:
    """One rank computes at a time in the forward of one micro-batch: both take half as long."""
    shared = replace(HARDWARE, waiting_speedup=2.0)
    alone = predicted(microbatches=1, hardware=HARDWARE)
    found = predicted(microbatches=1, hardware=shared)
    assert alone.times.ends == pytest.approx((8 + 6 + 12 + 16 + 6 + 14, 8 + 6 + 12 + 16))
    assert found.times.ends == pytest.approx((4 + 6 + 6 + 8 + 6 + 7, 4 + 6 + 6 + 8))
    assert found.timeline.makespan == pytest.approx(37e9)
    assert [[(cell.start, cell.end) for cell in row] for row in found.timeline.cells] == [
        [(0, 4e9), (30e9, 37e9)],
        [(10e9, 16e9), (16e9, 24e9)],
    ]
    assert found.timeline.hop == alone.timeline.hop * alone.timeline.tick == 6e9
    assert found.timeline.tick == 1
    assert found.breakdown["matrix products"] == pytest.approx(alone.breakdown["matrix products"] / 2)
    assert found.breakdown["pp communication"] == pytest.approx(12)
    assert sum(found.breakdown.values()) == pytest.approx(37)
    one = Plan(tp=4, precision="bf16")  # none waits
    assert predict(DECODER, one, shared).breakdown == predict(DECODER, one, HARDWARE).breakdown
