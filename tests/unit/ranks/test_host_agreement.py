"""Which hosts go on after a failure: never two groups of one world; and how many ranks each has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.ranks.launch.elastic.host_agreement import HostWorld, missing_for_majority, sizes_of_hosts


def world(hosts: int, generation: int = 1, hub: int = 0) -> HostWorld:
    return HostWorld(generation, tuple(range(hosts)), (1,) * hosts, hub, "tcp://host-0:1")


def test_a_majority_goes_on_and_of_two_halves_the_one_with_the_old_hub() -> None:
    assert missing_for_majority([world(3)], [1, 2], hub=1) == []
    assert missing_for_majority([world(3)], [0], hub=0) == [1, 2]
    assert missing_for_majority([world(2)], [0], hub=0) == []
    assert missing_for_majority([world(2)], [1], hub=1) == [0]
    assert missing_for_majority([], [0], hub=0) == []


def test_a_host_that_was_left_out_does_not_count_by_the_world_that_it_knows() -> None:
    """Hosts 0 and 1 have gone on without host 2; then host 1 alone meets host 2."""
    newer = HostWorld(2, (0, 1), (1, 1), 0, "tcp://host-0:1")
    assert missing_for_majority([world(3), newer], [1, 2], hub=1) == [0]
    newer = HostWorld(2, (0, 1, 2, 3), (1,) * 4, 0, "tcp://host-0:1")
    assert missing_for_majority([world(7), newer], [0, 1, 6], hub=0) == [], "of seven three are enough"


@given(st.integers(1, 7), st.data())
def test_of_hosts_that_cannot_reach_each_other_one_group_goes_on_at_most(
    hosts: int, data: st.DataObject
) -> None:
    side = [data.draw(st.integers(0, 2)) for _ in range(hosts)]
    hub = data.draw(st.integers(0, hosts - 1))
    goes_on = []
    for group in {*side}:
        present = [host for host in range(hosts) if side[host] == group]
        at = hub if hub in present else present[0]
        goes_on.append(not missing_for_majority([world(hosts, hub=hub)], present, at))
    assert sum(goes_on) <= 1


@given(st.dictionaries(st.integers(0, 5), st.integers(0, 4), min_size=1), st.integers(1, 16))
def test_ranks_are_spread_over_the_hosts_that_are_ready(ready: dict[int, int], wanted: int) -> None:
    sizes = sizes_of_hosts(ready, wanted, None)
    most = min(sum(ready.values()), wanted)
    if not most:
        assert sizes == ()
        return
    assert sum(sizes) == most
    room = [ready[host] for host in sorted(ready)]
    assert all(size <= each for size, each in zip(sizes, room, strict=True))
    with_room = sum(each > 0 for each in room)
    assert sum(size > 0 for size in sizes) == min(most, with_room)


def test_the_number_of_ranks_is_that_of_a_plan_that_fits() -> None:
    assert sizes_of_hosts({0: 2, 1: 1}, 4, lambda most: {3: 2}[most]) == (1, 1)
    assert sizes_of_hosts({0: 2, 2: 2}, 4, None) == (2, 2)
    assert sizes_of_hosts({0: 1}, 4, lambda _: 0) == ()


def test_ranks_are_numbered_host_after_host() -> None:
    found = HostWorld(3, (0, 2, 5), (2, 0, 1), 0, "tcp://host-0:1")
    assert [found.ranks_of(host) for host in found.hosts] == [range(2), range(2, 2), range(2, 3)]
    assert found.size == 3
