import torch

from plait.ranks import Count, Mesh, Traffic, all_reduce
from plait.ranks.group import Wait


def test_traffic_adds_up_calls_and_bytes_per_axis_and_kind():
    traffic = Traffic()
    traffic.record("dp", "all_reduce", 100)
    traffic.record("dp", "all_reduce", 20)
    traffic.record("dp", "all_gather", 3)
    traffic.record("tp", "all_reduce", 0)
    assert traffic.snapshot() == {
        "dp": {"all_reduce": Count(2, 120), "all_gather": Count(1, 3)},
        "tp": {"all_reduce": Count(1, 0)},
    }


def test_a_snapshot_of_traffic_does_not_change_with_later_calls():
    traffic = Traffic()
    traffic.record("dp", "all_reduce", 100)
    before = traffic.snapshot()
    traffic.record("dp", "all_reduce", 100)
    assert before == {"dp": {"all_reduce": Count(1, 100)}}


def test_traffic_since_a_snapshot_has_only_later_calls():
    traffic = Traffic()
    traffic.record("dp", "all_reduce", 100)
    traffic.record("tp", "send", 7)
    before = traffic.snapshot()
    assert traffic.since(before) == {}
    traffic.record("dp", "all_reduce", 5)
    traffic.record("pp", "send", 0)
    assert traffic.since(before) == {"dp": {"all_reduce": Count(1, 5)}, "pp": {"send": Count(1, 0)}}
    assert traffic.since({}) == traffic.snapshot()


def _waits() -> tuple[list[Wait], int]:
    mesh = Mesh(dp=2)
    before = mesh.traffic.blocked_nanoseconds
    mesh.traffic.waits = []
    all_reduce(torch.ones(3), mesh.group("dp")).wait()
    return mesh.traffic.waits, mesh.traffic.blocked_nanoseconds - before


def test_traffic_records_waits_and_their_sum(thread_ranks):
    for waits, blocked in thread_ranks.run(_waits, ranks=2):
        assert {axis for axis, _, _ in waits} == {"dp"}
        assert blocked == sum(end - start for _, start, end in waits) > 0
