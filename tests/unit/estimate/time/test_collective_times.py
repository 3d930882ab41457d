"""Times of collectives beside their formulas, on links whose latency and bytes both count."""

from dataclasses import replace

import pytest

from plait.estimate.time.hardware import Link, load_hardware
from plait.estimate.time.operation_times import Axis, AxisTransfer, Collective, Network
from plait.plan.plan import Plan

MEASURED = load_hardware("a100-80")
HARDWARE = replace(
    MEASURED,
    devices=4,
    inside=Link(bandwidth=200.0, latency=3.0),
    across=Link(bandwidth=30.0, latency=50.0),
    oversubscription=3.0,
    efficiency=replace(MEASURED.efficiency, inside=0.5, across=0.8, all_to_all=0.25, collective=1000.0),
)
"""Hosts of four devices. A rank reaches 100 bytes a second inside its host, and 8 across hosts."""


def seconds(plan: Plan, collective: Collective, axis: Axis, nbytes: float = 4800.0) -> float:
    return Network(plan, HARDWARE).seconds(AxisTransfer(collective, axis, nbytes))


INSIDE: tuple[tuple[Plan, Collective, Axis, float], ...] = (
    (Plan(tp=4), "all-gather", "tp", 3 * 3 + 4800 * 3 / 4 / 100),
    (Plan(tp=4), "reduce-scatter", "tp", 3 * 3 + 4800 * 3 / 4 / 100),
    (Plan(tp=4), "all-reduce", "tp", 2 * (3 * 3 + 4800 * 3 / 4 / 100)),
    (Plan(cp=4), "ring", "cp", 3 * (3 + 4800 / 100)),
    (Plan(cp=4), "all-to-all", "cp", 3 * 3 + 4800 / 4 * 3 / 4 / (100 / 4)),
    (Plan(pp=2, tp=2), "message", "pp", 3 + 4800 / 100),
    # Ranks of experts are the innermost, those of tp before those of dp.
    (Plan(dp=8, ep=4), "all-to-all", "ep_etp", 3 * 3 + 4800 / 4 * 3 / 4 / (100 / 4)),
    (Plan(dp=2, tp=2, ep=2, etp=2), "all-to-all", "ep_etp", 3 * 3 + 4800 / 4 * 3 / 4 / (100 / 4)),
    (Plan(dp=4, ep=2, strategy="full"), "reduce-scatter", "edp", 3 + 4800 / 2 / 100),
)
ACROSS: tuple[tuple[Plan, Collective, Axis, float], ...] = (
    # Three ranks of different hosts; then of two hosts and of four with four ranks each, whose links add up.
    (Plan(tp=4, dp=3, strategy="full"), "reduce-scatter", "shard", 2 * 50 + 4800 * 2 / 3 / 8),
    (Plan(dp=8, strategy="full"), "all-gather", "shard", 6 * 3 + 50 + 4800 * 7 / 8 / (4 * 8)),
    (Plan(dp=16, strategy="full"), "all-gather", "shard", 12 * 3 + 3 * 50 + 4800 * 15 / 16 / (4 * 8)),
    # A tree over two hosts takes two steps between them, a ring one; over 32 hosts ten and 31.
    (Plan(dp=8), "all-reduce", "shard", 2 * (6 * 3 + 50 + 4800 * 7 / 8 / (4 * 8))),
    (Plan(dp=128), "all-reduce", "shard", 2 * (3 * 3 + 10 * 50 + 4800 * 127 / 128 / (4 * 8))),
    (Plan(tp=4, cp=2), "ring", "cp", 50 + 4800 / 8),
    (Plan(cp=8), "ring", "cp", 7 * (50 + 4800 / 8)),
    # A rank sends half of what it has to the other host, by a link of its own.
    (Plan(cp=8), "all-to-all", "cp", 7 * 50 + 4800 / 8 / 2 / (8 / 4)),
    (Plan(pp=2, tp=4), "message", "pp", 50 + 4800 / 8),
    (Plan(dp=8, ep=8), "all-to-all", "ep_etp", 7 * 50 + 4800 / 8 / 2 / (8 / 4)),
    (Plan(dp=8, ep=4, strategy="full"), "reduce-scatter", "edp", 50 + 4800 / 2 / 8),
    # Copies are apart by the ranks that share state, stages by all ranks of a stage.
    (Plan(dp=4, replicate=2, strategy="full"), "all-reduce", "replicate", 2 * (3 + 4800 / 2 / 100)),
    (Plan(dp=8, replicate=2, strategy="full"), "all-reduce", "replicate", 2 * (50 + 4800 / 2 / 8)),
    (Plan(dp=8, replicate=2, strategy="full"), "all-gather", "shard", 3 * 3 + 4800 * 3 / 4 / 100),
    (Plan(dp=2, cp=2, strategy="full"), "all-gather", "shard", 3 * 3 + 4800 * 3 / 4 / 100),
    (Plan(pp=2, dp=4, replicate=2, strategy="full"), "message", "pp", 50 + 4800 / 8),
)


def test_a_transfer_takes_its_steps_and_its_bytes() -> None:
    """The time of a collective: a fixed start, a latency for each step, and the bytes by the bandwidth."""
    for rows in [INSIDE, ACROSS]:
        for plan, collective, axis, expected in rows:
            found = seconds(plan, collective, axis)
            assert found == pytest.approx(1000 + expected, rel=1e-12), (collective, plan)


def test_hosts_that_share_few_links_are_no_faster_inside_than_across() -> None:
    wide = replace(HARDWARE, across=Link(bandwidth=300.0, latency=50.0))
    transfer = AxisTransfer("all-gather", "shard", 4800.0)
    for plan, bandwidth in ((Plan(dp=8), 100), (Plan(tp=4, dp=2), 80)):  # of four links, and of one
        ranks = plan.dp
        steps = (ranks - 2) * 3 + 50
        expected = 1000 + steps + 4800 * (ranks - 1) / ranks / bandwidth
        assert Network(plan, wide).seconds(transfer) == pytest.approx(expected, rel=1e-12)


def test_a_collective_of_each_layer_costs_its_start_again() -> None:
    network, transfer = Network(Plan(dp=4), HARDWARE), AxisTransfer("all-gather", "shard", 4800.0)
    assert network.seconds_of_layers(transfer, 5) == network.seconds(transfer) + 4 * 1000
    assert Network(Plan(), HARDWARE).seconds_of_layers(transfer, 5) == 0
    assert seconds(Plan(), "all-reduce", "shard") == seconds(Plan(dp=4), "all-reduce", "shard", 0.0) == 0


def test_axes_share_links_that_are_both_inside_hosts_or_both_across_them() -> None:
    def shared(plan: Plan) -> bool:
        return Network(plan, HARDWARE).share_links("tp", "shard")

    assert shared(Plan(tp=2, dp=2))  # both inside a host
    assert not shared(Plan(tp=4, dp=4))
    assert not shared(Plan(tp=2, dp=4))
    assert shared(Plan(tp=8, dp=4))  # both across
    assert not shared(Plan(dp=4))
