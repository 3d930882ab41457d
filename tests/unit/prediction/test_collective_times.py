from dataclasses import replace

import pytest

from plait.plan import Plan
from plait.prediction.collective_times import Network
from plait.prediction.hardware import load_hardware
from plait.prediction.operations import Axis, AxisTransfer, Collective

HARDWARE = replace(load_hardware("a100-80"), oversubscription=1.0)
PART = HARDWARE.efficiency
NBYTES = 1e12  # so many that latency does not count


def seconds(plan: Plan, collective: Collective, axis: Axis) -> float:
    return Network(plan, HARDWARE).seconds(AxisTransfer(collective, axis, NBYTES))


def test_an_all_reduce_inside_a_host_sends_twice_the_bytes_but_for_a_rank() -> None:
    expected = 2 * NBYTES * 7 / 8 / (HARDWARE.inside.bandwidth * PART.inside)
    assert seconds(Plan(tp=8), "all-reduce", "tp") == pytest.approx(expected, rel=1e-3)
    assert seconds(Plan(tp=8), "all-gather", "tp") == pytest.approx(expected / 2, rel=1e-3)


def test_a_ring_across_hosts_uses_one_link_for_each_of_its_ranks_there() -> None:
    alone = seconds(Plan(tp=8, dp=4), "reduce-scatter", "shard")
    assert alone == pytest.approx(NBYTES * 3 / 4 / (HARDWARE.across.bandwidth * PART.across), rel=1e-3)
    together = seconds(Plan(tp=4, dp=4), "reduce-scatter", "shard")
    assert together == pytest.approx(alone / 2, rel=1e-3)


def test_oversubscription_divides_the_bandwidth_across_hosts_only() -> None:
    narrow = Network(Plan(tp=8, dp=4), replace(HARDWARE, oversubscription=3.0))
    transfer = AxisTransfer("all-gather", "shard", NBYTES)
    assert narrow.seconds(transfer) == pytest.approx(
        3 * seconds(Plan(tp=8, dp=4), "all-gather", "shard"), rel=1e-3
    )
    inside = AxisTransfer("all-gather", "tp", NBYTES)
    assert narrow.seconds(inside) == seconds(Plan(tp=8, dp=4), "all-gather", "tp")


def test_messages_between_stages_cross_hosts_where_neighbours_are_apart() -> None:
    inside = seconds(Plan(pp=2, tp=4), "message", "pp")
    across = seconds(Plan(pp=2, tp=8), "message", "pp")
    assert inside == pytest.approx(NBYTES / (HARDWARE.inside.bandwidth * PART.inside), rel=1e-3)
    assert across == pytest.approx(NBYTES / (HARDWARE.across.bandwidth * PART.across), rel=1e-3)


def test_an_axis_of_one_rank_costs_nothing_and_small_messages_cost_latency() -> None:
    assert seconds(Plan(), "all-reduce", "shard") == 0
    small = Network(Plan(dp=16), HARDWARE).seconds(AxisTransfer("all-reduce", "shard", 1.0))
    assert small > 2 * HARDWARE.across.latency
