"""Which hosts go on after a failure: never two groups of one world; and how many ranks each has."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from plait.ranks.launch.elastic.host_quorum import (
    HostWorld,
    KnownWorlds,
    missing_for_majority,
    sizes_of_hosts,
)


def world(hosts: int, generation: int = 1, hub: int = 0) -> HostWorld:
    return HostWorld(generation, tuple(range(hosts)), (1,) * hosts, hub, "tcp://host-0:1")


def knows(*hosts: int, of: HostWorld) -> dict[int, KnownWorlds]:
    """Hosts that are present, and have begun a world."""
    return dict.fromkeys(hosts, KnownWorlds(of))


def test_a_majority_goes_on_and_of_two_halves_the_one_with_the_old_hub() -> None:
    assert missing_for_majority(knows(1, 2, of=world(3)), range(3)) == []
    assert missing_for_majority(knows(0, of=world(3)), range(3)) == [1, 2]
    assert missing_for_majority(knows(0, of=world(2)), range(2)) == []
    assert missing_for_majority(knows(1, of=world(2)), range(2)) == [0]
    assert missing_for_majority({0: KnownWorlds()}, range(2)) == [1]
    assert missing_for_majority({0: KnownWorlds(), 1: KnownWorlds()}, range(2)) == []


def test_a_host_that_was_left_out_does_not_count_by_the_world_that_it_knows() -> None:
    """Hosts 0 and 1 have gone on without host 2; then host 1 alone meets host 2."""
    newer = HostWorld(2, (0, 1), (1, 1), 0, "tcp://host-0:1")
    assert missing_for_majority(knows(2, of=world(3)) | knows(1, of=newer), range(3)) == [0]
    newer = HostWorld(2, (0, 1, 2, 3), (1,) * 4, 0, "tcp://host-0:1")
    present = knows(6, of=world(7)) | knows(0, 1, of=newer)
    assert missing_for_majority(present, range(7)) == [], "of seven three are enough"


def test_a_host_with_empty_memory_does_not_count_unless_all_hosts_are_there() -> None:
    """Hosts 1 and 2 have gone on without host 0; host 2, started again, has forgotten that."""
    again = {2: KnownWorlds()}
    assert missing_for_majority(knows(0, of=world(3)) | again, range(3)) == [1]
    assert missing_for_majority(knows(0, 1, of=world(3)) | again, range(3)) == []
    assert missing_for_majority(knows(1, of=world(3)) | again | {0: KnownWorlds()}, range(3)) == []


def test_a_host_counts_by_a_world_that_it_has_accepted_until_another_one_of_that_number_has_begun() -> None:
    proposed = HostWorld(2, (0, 1, 2), (1,) * 3, 0, "tcp://host-0:1")
    accepted = {2: KnownWorlds(world(5), (proposed,))}
    assert missing_for_majority(accepted | knows(3, 4, of=world(5)), range(5)) == [0, 1]
    begun = HostWorld(2, (1, 3, 4), (1,) * 3, 1, "tcp://host-1:1")
    assert missing_for_majority(accepted | knows(3, 4, of=begun), range(5)) == []


@dataclass
class Group:
    """Hosts as the model below sees them: what each knows, and the world that it runs, if any."""

    known: dict[int, KnownWorlds]
    runs: dict[int, HostWorld]

    def start_again(self, hosts: list[int]) -> None:
        """Let hosts forget everything, and stop."""
        for host in hosts:
            self.known[host] = KnownWorlds()
            self.runs.pop(host, None)

    def meet(self, present: list[int], hub: int, accept: set[int], begin: set[int]) -> None:
        """Let hosts stop, and meet; only some hear of the next world, and of these some that it has begun."""
        for host in present:
            self.runs.pop(host, None)
        known = {host: self.known[host] for host in present}
        if missing_for_majority(known, range(len(self.known))):
            return
        together = KnownWorlds().merged(*known.values())
        new = HostWorld(together.generation + 1, tuple(present), (1,) * len(present), hub, "")
        for host in {*accept, hub}:
            self.known[host] = together.merged(KnownWorlds(None, (new,)))
        if accept >= {*present}:
            for host in {*begin, hub}:
                self.known[host] = KnownWorlds(new)
                self.runs[host] = new


def some(random: Random, hosts: int, share: float) -> set[int]:
    return {host for host in range(hosts) if random.random() < share}


@given(st.integers(0, 2**32))
def test_of_hosts_that_cannot_reach_each_other_and_are_started_again_one_group_goes_on_at_most(
    seed: int,
) -> None:
    """Any hosts meet, some are started again, such as host 0, and messages to some are lost."""
    random = Random(seed)
    for _ in range(100):
        hosts = random.randint(2, 5)
        first = world(hosts)
        group = Group(dict.fromkeys(range(hosts), KnownWorlds(first)), dict.fromkeys(range(hosts), first))
        for _ in range(random.randint(1, 12)):
            present = sorted(some(random, hosts, 0.5))
            if random.random() < 0.3:
                group.start_again(present)
            elif present:
                unheard, unbegun = some(random, hosts, 0.15), some(random, hosts, 0.3)
                group.meet(present, random.choice(present), {*present} - unheard, {*present} - unbegun)
            goes_on = [
                one for one in {*group.runs.values()} if all(group.runs.get(h) == one for h in one.hosts)
            ]
            assert len(goes_on) <= 1


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
