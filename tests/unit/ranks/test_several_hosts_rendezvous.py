"""Supervisors of several hosts, each a thread here, agree on worlds, and notice hosts that are gone."""

from __future__ import annotations

import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from select import select
from typing import Any, TypeVar

import pytest
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from plait.errors import CommunicationError, MeshError, PlaitError, RankError
from plait.ranks.failure.rank_failure import RankFailure
from plait.ranks.launch.elastic import several_hosts_rendezvous
from plait.ranks.launch.elastic.host_hub import HostRun
from plait.ranks.launch.elastic.host_link import HostLink, Message, connect_to_host
from plait.ranks.launch.elastic.several_hosts_rendezvous import HostPlace, SeveralHostsRendezvous

T = TypeVar("T")
SILENCE = 1.0
LIMIT = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Hosts:
    """Supervisors that meet at the first one's port; with `named` they know all addresses from the start."""

    def __init__(self, number: int, ranks: int, limit: float, at: str, *, named: bool, later: bool) -> None:
        self.port, self._limit, self._at = free_port(), limit, at
        self._names = tuple(f"127.0.0.{one + 1}" for one in range(number)) if named else ()
        self._run = HostRun("a job", number, ranks, None, later)
        self._threads = ThreadPoolExecutor(8)
        self._made: list[SeveralHostsRendezvous] = []
        self.first = [self.new(one) for one in range(number)]

    def new(self, number: int, job: str = "a job") -> SeveralHostsRendezvous:
        """Start the supervisor of a host, also of one that was lost, which has two processes."""
        place, run = HostPlace(number, self._at, (self.port,), self._names), self._run
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
def supervisors(
    number: int,
    ranks: int,
    limit: float = LIMIT,
    at: str = "127.0.0.1",
    *,
    named: bool = False,
    later: bool = False,
) -> Iterator[Hosts]:
    found = Hosts(number, ranks, limit, at, named=named, later=later)
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
        assert select(one.handles, [], [], 0) == ([], [], []), "reading the reason has taken the news"
        two.ready = 1
        joined = hosts.join(two)
        assert one.num_nodes_waiting() == 1
        assert one.failure_elsewhere() == ("rank 3 of host 1 was killed", 7, [3])
        assert one.failure_elsewhere() is None
        assert hosts.meet(one) == (2, {0: [0, 1], 1: [2]})
        joined[0].result(LIMIT)
        assert one.num_nodes_waiting() == two.num_nodes_waiting() == 0


def test_of_two_hosts_the_first_goes_on_alone_and_the_other_ends_after_the_limit() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        two.shutdown()
        assert wait_for(one.reason) == "host 1 is gone"
        assert hosts.meet(one) == (2, {0: [0, 1]})
    with supervisors(2, 4, limit=1.0) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        one.shutdown()
        assert wait_for(two.reason).startswith("host 0")
        with pytest.raises(CommunicationError, match=r"no majority of the 2 hosts .* \(host 0 cannot"):
            hosts.meet(two)


def listens(address: str) -> bool:
    try:
        socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("at", ["127.0.0.1", "::1"])
def test_two_of_three_hosts_meet_at_the_next_one_when_the_first_is_gone(at: str) -> None:
    if not listens(at):
        pytest.skip(f"this machine has no {at}")
    with supervisors(3, 6, at=at) as hosts:
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


def kill_hub(host: SeveralHostsRendezvous) -> None:
    """End the connections to a host as the end of its process does, without a last message."""
    host._hub._listener.shutdown(socket.SHUT_RDWR)
    host._hub._listener.close()
    links = [*host._hub._links]
    for link in links:  # else it could tell one that another, which is gone, knows of the end
        link.send = lambda message: None  # type: ignore[method-assign]
    for link in links:
        link._end()


def test_a_host_that_has_heard_of_the_end_tells_the_others_where_the_first_one_is_killed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with supervisors(3, 6) as hosts:
        one, two, three = hosts.first
        hosts.meet(one, two, three)
        lost = one._hub._peers[2].link
        send = lost.send
        monkeypatch.setattr(lost, "send", lambda told: told["kind"] == "finished" or send(told))
        for host in hosts.first:
            host.finish([pickle.dumps(rank) for rank in host.ranks(0)[0]])
        assert wait_for(lambda: two.finish([]))
        kill_hub(one)
        assert wait_for(three.reason).startswith("host 0")
        two.shutdown()
        assert wait_for(lambda: three.finish([]))
        assert three.results == [0, 1, 2, 3, 4, 5]
        assert three.reason() == ""


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


def lose_the_first(hosts: Hosts) -> None:
    """Let three hosts meet, and then two of them without the first one, at the second."""
    one, two, three = hosts.first
    hosts.meet(one, two, three)
    one.shutdown()
    assert wait_for(two.reason)
    assert wait_for(three.reason)
    assert hosts.meet(two, three) == (2, {1: [0, 1], 2: [2, 3]})


def test_the_first_host_finds_the_others_when_it_is_started_again_after_they_have_gone_on() -> None:
    with supervisors(3, 6, named=True) as hosts:
        lose_the_first(hosts)
        _, two, three = hosts.first
        again = hosts.new(0)
        joined = hosts.join(again)
        assert wait_for(two.reason) == "host 0 has come"
        assert hosts.meet(two, three) == (3, {0: [0, 1], 1: [2, 3], 2: [4, 5]})
        joined[0].result(LIMIT)
        assert again.name == two.name


def test_a_host_finds_the_others_while_the_first_one_is_gone() -> None:
    with supervisors(3, 6, named=True) as hosts:
        lose_the_first(hosts)
        _, two, three = hosts.first
        three.shutdown()
        assert wait_for(two.reason)
        assert hosts.meet(two) == (3, {1: [0, 1]})
        joined = hosts.join(hosts.new(2))
        assert wait_for(two.reason) == "host 2 has come"
        assert hosts.meet(two) == (4, {1: [0, 1], 2: [2, 3]})
        joined[0].result(LIMIT)


@pytest.mark.full
def test_all_hosts_meet_again_where_the_last_world_has_met_though_that_host_has_forgotten_it() -> None:
    """Hosts 1 and 2 have met at host 1; then host 1 is started again, and later host 0."""
    with supervisors(3, 6, named=True) as hosts:
        lose_the_first(hosts)
        _, two, three = hosts.first
        two.shutdown()
        assert wait_for(three.reason)
        joined = hosts.join(three, hosts.new(1))
        time.sleep(0.4)
        assert not any(each.done() for each in joined), "host 0 may have gone on with host 1"
        joined += hosts.join(hosts.new(0))
        for each in joined:
            each.result(LIMIT)
        assert three.world.hosts == (0, 1, 2)
        assert three.generation == 3


@pytest.mark.full
def test_a_host_that_was_cut_off_finds_where_the_others_have_gone_on_from_those_that_it_knew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one, where all have met: it waits at its own hub, where nobody comes any more."""
    is_cut_off = threading.Event()
    with supervisors(3, 6) as hosts:

        def connect(host: str, port: int, seconds: float) -> socket.socket | None:
            is_refused = is_cut_off.is_set() and port == hosts.port
            return None if is_refused else connect_to_host(host, port, seconds)

        monkeypatch.setattr(several_hosts_rendezvous, "connect_to_host", connect)
        one, two, three = hosts.first
        hosts.meet(one, two, three)
        is_cut_off.set()
        for link in [*one._hub._links]:
            link.close()
        for host in hosts.first:
            assert wait_for(host.reason)
        assert hosts.meet(two, three) == (2, {1: [0, 1], 2: [2, 3]})
        is_cut_off.clear()
        joined = hosts.join(one)
        assert wait_for(two.reason) == "host 0 has come"
        assert hosts.meet(two, three) == (3, {0: [0, 1], 1: [2, 3], 2: [4, 5]})
        joined[0].result(LIMIT)


def test_two_hosts_do_not_begin_anew_beside_a_third_that_goes_on_though_one_has_forgotten_it() -> None:
    """Hosts 1 and 2 have gone on; host 2, started again, meets host 0, which knows the first world only."""
    with supervisors(3, 6, limit=1.5) as hosts:
        one, two, three = hosts.first
        hosts.meet(one, two, three)
        three.shutdown()
        assert wait_for(one.reason)
        two.shutdown()  # for the others, as if it had gone on with host 2
        joined = hosts.join(one, hosts.new(2))
        for each in joined:
            with pytest.raises(CommunicationError, match=r"host 1"):
                each.result(LIMIT)


def test_hosts_that_come_later_wait_until_the_others_leave_their_world() -> None:
    with supervisors(2, 4, later=True) as hosts:
        one, two = hosts.first
        hosts.meet(one, two)
        two.shutdown()
        assert wait_for(one.reason)
        assert hosts.meet(one) == (2, {0: [0, 1]})
        assert one.larger_world(2) == 0
        joined = hosts.join(again := hosts.new(1))
        wait_for(lambda: one.larger_world(2) == 4)
        assert (one.reason(), one.num_nodes_waiting()) == ("", 0)
        assert hosts.meet(one) == (3, {0: [0, 1], 1: [2, 3]})
        joined[0].result(LIMIT)
        one.ready = 1  # a rank is lost, whose place a new process takes later
        one.report(RankFailure(0, "was killed"), None)
        joined = hosts.join(again)
        assert hosts.meet(one) == (4, {0: [0], 1: [1, 2]})
        joined[0].result(LIMIT)
        assert again.larger_world(2) == 0
        assert one.larger_world(2) == 0
        wait_for(lambda: again.larger_world(2) == one.larger_world(2) == 4)
        assert one.larger_world(1) == 4
        wait_for(lambda: again.larger_world(2) == one.larger_world(1) == 0)


def test_hosts_without_any_process_wait_for_new_ones_where_these_are_to_come_later() -> None:
    with supervisors(2, 4, later=True) as hosts:
        for host in hosts.first:
            host.ready = 0
        assert hosts.meet(*hosts.first) == (1, {0: [0, 1], 1: [2, 3]})


class OtherSide:
    """The connection of a test to a supervisor, in place of another supervisor."""

    def __init__(self, connected: socket.socket) -> None:
        self._messages: queue.Queue[Message | None] = queue.Queue()
        self.link = HostLink(connected, lambda _, message: self._messages.put(message), SILENCE)
        self.link.start()

    def next(self, kind: str) -> Message:
        """Return the next message of a kind."""
        while (found := self._messages.get(timeout=LIMIT)) is None or found["kind"] != kind:
            assert found is not None, f"the connection ended before {kind}"
        return found

    def first(self) -> Message:
        """Return the next message, unless it only says that the other side is there."""
        while (found := self._messages.get(timeout=LIMIT)) is None or found["kind"] == "beat":
            assert found is not None, "the connection ended"
        return found

    def join(self, number: int, **changed: Any) -> None:
        """Join as a host that was started anew."""
        about = {"addresses": ["127.0.0.1"], "hub": ["127.0.0.1", 1]}
        told = {"kind": "join", "job": "a job", "host": number, "token": str(number), "name": ""}
        known = {"begun": None, "accepted": []}
        self.link.send(told | {"known": known, "ready": 2, "most": 2, "about": about} | changed)


def other_side(hosts: Hosts) -> OtherSide:
    connected = connect_to_host("127.0.0.1", hosts.port, LIMIT)
    assert connected is not None
    return OtherSide(connected)


def joining(server: socket.socket) -> tuple[OtherSide, Message]:
    """Return the next connection over which a host joins, and its message; others only ask where to."""
    while (told := (other := OtherSide(server.accept()[0])).first())["kind"] != "join":
        other.link.close()
    return other, told


def test_a_world_begins_when_all_its_hosts_have_accepted_it() -> None:
    """One that is lost before is not in the next; the others count by the world that was not begun."""
    with supervisors(3, 6) as hosts:
        one, two, _ = hosts.first
        other = other_side(hosts)
        joined = hosts.join(one, two)
        other.join(2)
        (proposed,) = other.next("propose")["known"]["accepted"]
        assert (proposed["generation"], proposed["hosts"]) == (1, [0, 1, 2])
        time.sleep(0.2)
        assert not any(each.done() for each in joined)
        other.link.send({"kind": "accept", "generation": 0})
        other.link.close()
        for each in joined:
            each.result(LIMIT)
        assert one.world.generation == 2
        assert one.world.hosts == two.world.hosts == (0, 1)


def test_a_host_whose_hub_is_lost_after_it_has_accepted_a_world_says_so_at_the_next_hub() -> None:
    with supervisors(2, 4) as hosts:
        one, two = hosts.first
        one.shutdown()
        with socket.create_server(("127.0.0.1", hosts.port)) as server:
            joined = hosts.join(two)
            other, told = joining(server)
            assert told["known"] == {"begun": None, "accepted": []}
            world = {
                "generation": 1,
                "hosts": [0, 1],
                "sizes": [2, 2],
                "hub": 0,
                "store": "tcp://127.0.0.1:1",
            }
            other.link.send({"kind": "propose", "known": {"begun": None, "accepted": [world]}})
            assert other.next("accept")["generation"] == 1
            other.link.close()
            other, told = joining(server)
            assert told["known"] == {"begun": None, "accepted": [world]}
            other.link.send({"kind": "end", "why": "it was a test"})
            with pytest.raises(RankError, match="it was a test"):
                joined[0].result(LIMIT)
            other.link.close()


def test_strangers_and_messages_that_are_none_change_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with supervisors(2, 4) as hosts:
        strangers = [socket.create_connection(("127.0.0.1", hosts.port)) for _ in range(4)]
        for stranger, sent in zip(
            strangers, (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0", b""), strict=True
        ):
            stranger.sendall(sent)
        other = other_side(hosts)
        other.link.send({"kind": "join", "job": "a job", "host": "one"})
        other.link.send({"no": "kind"})
        assert hosts.meet(*hosts.first) == (1, {0: [0, 1], 1: [2, 3]})
        other.link.close()
        for stranger in strangers:
            stranger.close()
    assert "a message of kind join at the supervisor's port is ignored" in capfd.readouterr().err
