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


def test_a_collective_of_each_layer_costs_its_start_again() -> None:
    slow = replace(HARDWARE, efficiency=replace(PART, collective=1e-3))
    network, transfer = Network(Plan(dp=4), slow), AxisTransfer("all-gather", "shard", NBYTES)
    assert network.seconds_of_layers(transfer, 5) == pytest.approx(network.seconds(transfer) + 4e-3)
    assert Network(Plan(), slow).seconds_of_layers(transfer, 5) == 0


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


def test_the_latency_of_gathers_grows_with_the_ranks_and_that_of_all_reduces_with_their_logarithm() -> None:
    def latency(collective: Collective, hosts: int) -> float:
        return Network(Plan(dp=8 * hosts), HARDWARE).seconds(AxisTransfer(collective, "shard", 1.0))

    inside, across = HARDWARE.inside.latency, HARDWARE.across.latency
    assert latency("all-gather", 512) == pytest.approx(7 * 512 * inside + 511 * across)
    assert latency("reduce-scatter", 512) == pytest.approx(latency("all-gather", 512))
    assert latency("all-reduce", 512) == pytest.approx(2 * (7 * inside + 2 * 9 * across))
    assert latency("all-gather", 1) == pytest.approx(7 * inside)


def test_axes_share_links_that_are_both_inside_hosts_or_both_across_them() -> None:
    def shared(plan: Plan) -> bool:
        return Network(plan, HARDWARE).share_links("tp", "shard")

    assert shared(Plan(tp=2, dp=4))  # both inside a host
    assert not shared(Plan(tp=8, dp=4))
    assert not shared(Plan(tp=2, dp=8))
    assert shared(Plan(tp=16, dp=4))  # both across
    assert not shared(Plan(dp=4))
