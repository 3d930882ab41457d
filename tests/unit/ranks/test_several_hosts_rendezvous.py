"""Supervisors of several hosts, each a thread here, agree on worlds, and notice hosts that are gone."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from select import select
from typing import TypeVar

import pytest
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from plait.errors import CommunicationError, MeshError, PlaitError, RankError
from plait.ranks.failure.failure_log import RankFailure
from plait.ranks.launch.elastic.host_hub import HostRun
from plait.ranks.launch.elastic.several_hosts_rendezvous import HostPlace, SeveralHostsRendezvous

T = TypeVar("T")
SILENCE = 1.0
LIMIT = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Hosts:
    """Supervisors that meet at the first one's port."""

    def __init__(self, number: int, ranks: int, limit: float) -> None:
        self._port, self._limit = free_port(), limit
        self._run = HostRun("a job", number, ranks, None)
        self._threads = ThreadPoolExecutor(8)
        self._made: list[SeveralHostsRendezvous] = []
        self.first = [self.new(one) for one in range(number)]

    def new(self, number: int, job: str = "a job") -> SeveralHostsRendezvous:
        """Start the supervisor of a host, also of one that was lost, which has two processes."""
        place, run = HostPlace(number, "127.0.0.1", (self._port,)), self._run
        made = SeveralHostsRendezvous(place, replace(run, job=job), 2, self._limit, SILENCE)
        self._made.append(made)
        return made

    def join(self, *hosts: SeveralHostsRendezvous) -> list[Future[object]]:
        """Let hosts join the next world, each in a thread."""
        return [self._threads.submit(host.next_rendezvous) for host in hosts]

    def meet(self, *hosts: SeveralHostsRendezvous) -> tuple[int, dict[int, list[int]]]:
        """Let hosts join the next world; return its number, and the ranks of its hosts."""
        for joined in self.join(*hosts):
            joined.result(LIMIT)
        (world,) = {host.world for host in hosts}
        assert all(host.ranks(0)[1] == world.size for host in hosts)
        return world.generation, {host: list(world.ranks_of(host)) for host in world.hosts}

    def close(self) -> None:
        for host in self._made:
            host.shutdown()
        self._threads.shutdown()


@contextmanager
def supervisors(number: int, ranks: int, limit: float = LIMIT) -> Iterator[Hosts]:
    found = Hosts(number, ranks, limit)
    try:
        yield found
    finally:
        found.close()


def wait_for(condition: Callable[[], T]) -> T:
    """Return what `condition` returns, once that is true."""
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_host_whose_rank_has_failed_makes_the_others_stop_and_all_meet_again() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        assert hosts.meet(one, two) == (1, {0: [0, 1], 1: [2, 3]})
        assert one.num_nodes_waiting() == two.num_nodes_waiting() == 0
        two.report(RankFailure(3, "was killed\nat a line"), 7, [3])
        assert wait_for(one.reason) == "a rank of host 1 has failed"
        assert two.reason() == "", "it stops by itself"
        two.ready = 1
        joined = hosts.join(two)
        assert select(one.handles, [], [], 0) == ([], [], []), "reading the reason has taken the news"
        assert one.num_nodes_waiting() == 1
        assert one.failure_elsewhere() == ("rank 3 of host 1 was killed", 7, [3])
        assert one.failure_elsewhere() is None
        assert hosts.meet(one) == (2, {0: [0, 1], 1: [2]})
        joined[0].result(LIMIT)
        assert one.num_nodes_waiting() == two.num_nodes_waiting() == 0


def test_of_two_hosts_the_first_goes_on_alone_and_the_other_ends_after_the_limit() -> None:
    with supervisors(2, 4, limit=2.0) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        two.shutdown()
        assert wait_for(one.reason) == "host 1 is gone"
        assert hosts.meet(one) == (2, {0: [0, 1]})
    with supervisors(2, 4, limit=2.0) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        one.shutdown()
        assert wait_for(two.reason).startswith("host 0")
        with pytest.raises(CommunicationError, match=r"no majority of the 2 hosts .* \(host 0 cannot"):
            hosts.meet(two)


def test_two_of_three_hosts_meet_at_the_next_one_when_the_first_is_gone() -> None:
    with supervisors(3, 6) as hosts:
        one, two, three = hosts.first
        hosts.meet(one, two, three)
        one.shutdown()
        assert wait_for(two.reason)
        assert wait_for(three.reason)
        assert hosts.meet(three, two) == (2, {1: [0, 1], 2: [2, 3]})
        assert two.address == three.address
        three.shutdown()
        assert wait_for(two.reason)
        assert hosts.meet(two) == (3, {1: [0, 1]}), "half of the last world, where it has met"


def test_a_host_that_was_started_again_comes_back_and_one_too_many_waits_until_the_end() -> None:
    with supervisors(2, 4, limit=1.0) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        two.shutdown()
        assert wait_for(one.reason)
        hosts.meet(one)
        again, spare = hosts.new(1), hosts.new(2)
        joined = hosts.join(again)
        assert wait_for(one.reason) == "host 1 has come"
        assert hosts.meet(one) == (3, {0: [0, 1], 1: [2, 3]})
        joined[0].result(LIMIT)
        assert again.name == one.name
        joined = hosts.join(spare)
        time.sleep(1.3)  # longer than its limit
        assert not joined[0].done()
        for host, results in ((one, [0, 1]), (again, [2.5, "three"])):
            assert one.reason() == ""
            host.finish([pickle.dumps(result) for result in results])
        for host in (one, again):
            assert wait_for(lambda host=host: host.finish([]))
            assert host.results == [0, 1, 2.5, "three"]
        with pytest.raises(RendezvousGracefulExitError):
            joined[0].result(LIMIT)


def test_the_first_host_comes_back_where_the_other_waits_for_it() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        one.shutdown()
        joined = hosts.join(two)
        again = hosts.new(0)
        assert hosts.meet(again) == (2, {0: [0, 1], 1: [2, 3]})
        joined[0].result(LIMIT)
        assert again.name == two.name == one.name


def test_a_host_that_ends_by_an_error_ends_the_others() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        one.finish([pickle.dumps(0), pickle.dumps(1)])
        with pytest.raises(PlaitError, match="rank 2's result is a Fraction"):
            two.finish([pickle.dumps(Fraction(1, 2)), pickle.dumps(3)])
        with pytest.raises(PlaitError, match="rank 3's result cannot be read here"):
            two.finish([pickle.dumps(2), b"cmine\nResult\n."])
        two.end("rank 3 failed")
        assert wait_for(one.reason) == "host 1 ends the run: rank 3 failed"
        assert not one.finish([])
        with pytest.raises(RankError, match="host 1 ends the run: rank 3 failed"):
            hosts.meet(one)


def test_too_few_processes_on_all_hosts_end_the_run_on_each() -> None:
    with supervisors(2, 4) as hosts:
        for host in hosts.first:
            host.ready = 0
        for joined in hosts.join(*hosts.first):
            with pytest.raises(RankError, match="0 processes are left, too few"):
                joined.result(LIMIT)


def test_all_hosts_learn_which_of_them_wait_in_vain() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        assert one.exchange_waiting(True, True) == (False, False)
        wait_for(lambda: two.exchange_waiting(False, False) == (True, False))
        wait_for(lambda: two.exchange_waiting(True, True) == (True, False))
        wait_for(lambda: one.exchange_waiting(True, True) == (True, True))
        one.exchange_waiting(False, True)  # its ranks have ended
        wait_for(lambda: two.exchange_waiting(True, True) == (False, True))


def test_hosts_that_do_not_come_and_runs_of_others_are_named() -> None:
    with supervisors(2, 4, limit=1.0) as hosts:
        one, _ = hosts.first
        other = hosts.new(1, job="another job")
        joined = hosts.join(one, other)
        with pytest.raises(CommunicationError, match=r"host 0 of 2 .* and host 1 did not come"):
            joined[0].result(LIMIT)
        with pytest.raises(CommunicationError, match=r"host 1 of 2 .* and nothing of this run answers"):
            joined[1].result(LIMIT)
        with pytest.raises(MeshError, match="cannot listen at port"):
            hosts.new(0)


def test_of_two_processes_that_are_one_host_the_later_takes_part() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        joined = [*hosts.join(two), *hosts.join(hosts.new(1))]
        ended, _ = wait(joined, LIMIT, FIRST_COMPLETED)
        with pytest.raises(RankError, match="another process is host 1, too"):
            ended.pop().result()
        joined += hosts.join(one)
        assert sum(each.exception(LIMIT) is None for each in joined) == 2
        assert one.world.hosts == (0, 1)
