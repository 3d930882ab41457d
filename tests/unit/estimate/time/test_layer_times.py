"""Times of layers where every kernel takes a second, and a transfer five and one for each of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from one_second_kernels import DECODER, FAST, HARDWARE

from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.hardware import Hardware
from plait.estimate.time.layer_times import LayerTimer, Parts, PassTimes
from plait.estimate.time.layer_work import LayerWork
from plait.estimate.time.operation_times import AxisTransfer
from plait.plan.decoder_sizes import LayerKind
from plait.plan.plan import Plan

TP = {"tp": 2, "sequence_parallel": "keep"}
ON_CPU = replace(HARDWARE, overlaps=False)
PLAIN = PassTimes(Parts(2, 1, 4), Parts(2, 3, 5), Parts(2))
"""Attention on one rank: two linears, a norm, two rotations and a residual, in the backward of two each."""


def times(
    kind: LayerKind = "attention",
    recompute: Any = "none",
    hardware: Hardware = HARDWARE,
    at_once: bool = True,
    **fields: Any,
) -> PassTimes:
    shape = MicrobatchShape(DECODER, Plan(precision="bf16", **fields), rows=1)
    return LayerTimer(shape, hardware, "bf16").times(kind, recompute, at_once=at_once)


def test_times_are_those_of_the_operations_by_their_kind() -> None:
    assert times() == PLAIN
    assert times("embedding") == PassTimes(Parts(elementwise=1), Parts(elementwise=2), Parts())
    assert times("mlp") == PassTimes(Parts(3, 0, 3), Parts(3, 0, 4), Parts(3))
    assert times("head") == PassTimes(Parts(1, 0, 5), Parts(1, 0, 4), Parts(1))
    assert PLAIN.backward == 12
    assert PLAIN.total == Parts(6, 4, 9)
    assert (PLAIN + PLAIN.times(2)).total == Parts(18, 12, 27)


def test_sums_over_tp_are_hidden_by_weight_gradients() -> None:
    for fields, forward, backward in [
        (TP, 6 + 6, 6 + (6 - 2)),  # gathers, and sums that run while the weight gradients do
        ({**TP, "sequence_parallel": "regather"}, 6 + 6, 6 + (6 + 6 - 2)),
        ({"tp": 2}, 7, 7 - 2),
        ({**TP, "at_once": False}, 12, 12),
        ({**TP, "hardware": ON_CPU}, 12, 12),
    ]:
        found = times(**fields)
        assert found.forward.seconds == pytest.approx(replace(PLAIN.forward, tp=forward).seconds)
        assert found.inputs.seconds == pytest.approx(replace(PLAIN.inputs, tp=backward).seconds)
        assert found.weights == PLAIN.weights


class Experts(LayerTimer):
    """A layer whose tokens take two seconds there and two back, beside its other operations."""

    def work(self, kind: LayerKind) -> LayerWork:
        travels = (AxisTransfer("all-to-all", "ep_etp", 1.0),) * 2
        return replace(super().work(kind), forward_dispatches=travels, backward_dispatches=travels)


def test_the_way_back_of_gradients_is_hidden_by_weight_gradients() -> None:
    for hardware, tp, at_once, expected in [
        (HARDWARE, 1, True, lambda one, whole: whole - min(whole / 2, one.weights.total)),
        (HARDWARE, 1, False, lambda one, whole: whole),
        (HARDWARE, 2, True, lambda one, whole: whole),  # they run during the sum over tp
        (ON_CPU, 1, True, lambda one, whole: whole),
    ]:
        plan = Plan(precision="bf16", dp=2, tp=tp, ep=2)
        found = Experts(MicrobatchShape(DECODER, plan, rows=1), hardware, "bf16").times(
            "attention", "none", at_once=at_once
        )
        assert found.forward.ep > 0
        assert found.inputs.ep == pytest.approx(expected(found, found.forward.ep))


def test_backwards_repeat_operations_and_transfers() -> None:
    """A ring is hidden but for the part of attention that needs no other rank's keys."""
    for recompute, fields, again, cp in [
        ("selective", {}, 3 + 100, 0),  # a norm and two rotations
        ("full", {}, 5 + 100, 0),  # and a product, and attention
        ("selective", TP, 3 + 6 + 100, 0),
        ("full", TP, 5 + 6 + 100, 0),
        ("none", {"cp": 2, "context_parallel": "ring"}, 0, 6 - 3 / 2),
        ("full", {"cp": 2, "context_parallel": "ring"}, 5 + 100, 6 - 3 / 2 + 6 - 1 / 2),
        ("selective", {"cp": 2, "context_parallel": "ulysses"}, 3 + 100, 3 * 6 + 2 * 6),
        ("full", {"cp": 3, "context_parallel": "ulysses"}, 5 + 100, 6 * 7),
    ]:
        found = times(recompute=recompute, **fields)
        assert (found.inputs.recomputation, found.inputs.cp) == pytest.approx((again, cp))
        assert found.forward.recomputation == found.weights.total - 2 == 0


def test_a_ring_is_hidden_behind_attention_where_the_hardware_overlaps_it() -> None:
    ring = {"cp": 4, "context_parallel": "ring"}  # three messages after one another, of a second each
    assert times(**ring).forward.cp == 5 + 3 - 3 / 4
    assert times(**ring, hardware=ON_CPU).forward.cp == 5 + 3
    quick = replace(
        HARDWARE, efficiency=replace(HARDWARE.efficiency, collective=0.0), inside=replace(FAST, latency=0)
    )
    assert times(**ring, hardware=quick).forward.cp == 0


def test_parameters_are_gathered_and_gradients_summed_while_a_layer_runs() -> None:
    """Over 32 ranks each takes 5 + 31 seconds; the forward 7, and the backward 12."""
    for fields, forward, backward in [
        ({"strategy": "optimizer"}, 0, 0),
        ({"strategy": "gradients", "reduce": "each"}, 0, 36 - 12),
        ({"strategy": "gradients"}, 0, 0),
        ({"strategy": "full"}, 36 - 7, 36 - 12),
        ({"strategy": "full", "reduce": "each"}, 36 - 7, 72 - 12),
        ({"strategy": "full", "recompute": "full"}, 36 - 7, 0),
        ({"strategy": "full", "hardware": ON_CPU}, 36, 36),
        ({"strategy": "full", "replicate": 32}, 0, 0),
        # Over `tp` on the same links the time of its transfers hides nothing; on others it does.
        ({"strategy": "full", **TP}, 36 - 7, 36 - (12 + 10 - 12)),
        ({"strategy": "full", **TP, "recompute": "full"}, 36 - 7, 0),
        ({"strategy": "full", **TP, "hardware": replace(HARDWARE, devices=2)}, 36 - 19, 36 - 22),
    ]:
        found = times(dp=32, **fields)
        assert (found.forward.dp, found.inputs.dp, found.weights.dp) == (forward, backward, 0)


def test_the_device_waits_for_the_host_to_start_operations() -> None:
    slow = replace(HARDWARE, efficiency=replace(HARDWARE.efficiency, host=40.0))
    found = times(hardware=slow, **TP)
    assert (found.forward.host, found.inputs.host, found.weights.host) == (7 * 40 - 19, 8 * 40 - 20, 0)
    again = times(recompute="full", hardware=slow)  # the whole forward counts, see `started_backward`
    assert again.inputs.host == (8 + 7) * 40 - 10 - 105
    assert times(recompute="selective", hardware=slow).inputs.host == 8 * 40 - 10 - 103
    assert times(hardware=replace(slow, efficiency=replace(slow.efficiency, host=0.5))).forward.host == 0


def test_layers_of_one_kind_are_timed_once_for_all_plans_that_share_them() -> None:
    shape = MicrobatchShape(DECODER, Plan(precision="bf16"), rows=1)
    first = LayerTimer(shape, HARDWARE, "bf16")
    found = first.times("mlp", "none", at_once=False)
    slower = replace(HARDWARE, efficiency=replace(HARDWARE.efficiency, kernel=2.0))
    shared = LayerTimer(shape, slower, "bf16", first.known, first.whole)
    assert shared.times("mlp", "none", at_once=False) is found
    for other in (shared.times("mlp", "none"), shared.times("mlp", "full", at_once=False)):
        assert other.forward == found.forward.times(2)
    assert {*first.known} == {*first.whole}
    assert len(first.known) == 3
    sharing = replace(slower, waiting_speedup=1.5)  # where other ranks of a pipeline wait
    for pp, speedup in ((1, 1.0), (2, 1.5)):
        assert LayerTimer(replace(shape, plan=Plan(pp=pp)), sharing, "bf16").speedup == speedup
