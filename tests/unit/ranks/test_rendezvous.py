"""The rendezvous of ranks, here threads of one process: who meets, and what the others are told."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from strangers import NEEDS_TWO_USERS, forked_process, process_of_another_user

from plait.errors import CommunicationError
from plait.ranks import run_store
from plait.ranks.failure.failure_log import FailureLog
from plait.ranks.launch import rendezvous
from plait.ranks.launch.rendezvous import Meeting, Participant, meet
from plait.ranks.launcher_environment import World


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_READ", 0.2)
    monkeypatch.setattr(run_store, "_PROBE_SECONDS", 0.5)


def free_ports(count: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def world(rank: int, size: int, *ports: int, job: str = "", host: str = "127.0.0.1") -> World:
    return World(rank, size, rank, size, "pmi", f"tcp://{host}:{ports[0]}", ports[1:], job)


def outcomes(*calls: Callable[[], Meeting]) -> list[Meeting | str]:
    """The results of calls in threads of their own, or their errors as text."""

    def outcome(call: Callable[[], Meeting]) -> Meeting | str:
        try:
            return call()
        except CommunicationError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(outcome, calls)]


def meeting(*worlds: World, timeout: float = 20.0) -> list[Meeting | str]:
    return outcomes(*(lambda one=one: meet(one, timeout) for one in worlds))


def shared(results: list[Meeting | str]) -> bool:
    """Whether these ranks have one store, which is within one host."""
    assert all(isinstance(one, Meeting) and one.on_one_host for one in results), results
    results[0].store.set("key", "of this run")
    return all(one.store.check(["key"]) for one in results)


def test_ranks_that_start_in_any_order_share_one_store():
    (port,) = free_ports(1)
    assert shared(meeting(*(world(rank, 3, port) for rank in (2, 0, 1))))


def test_the_store_of_ranks_on_one_host_is_not_open_to_others():
    """The table of the system has its address, 127.0.0.1 in hexadecimal digits and no other."""
    (port,) = free_ports(1)
    results = meeting(world(0, 2, port), world(1, 2, port))
    assert shared(results)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"] == [
        f"0100007F:{port:04X}"
    ]


def test_two_runs_that_derive_the_same_port_use_two_ports():
    """The other run has the first port; this one takes the second, whichever of its ranks comes first."""
    first, second = free_ports(2)
    other = meeting(world(0, 2, first, second, job="other"), world(1, 2, first, second, job="other"))
    own = meeting(world(1, 2, first, second, job="own"), world(0, 2, first, second, job="own"))
    assert shared(other)
    assert shared(own)
    own[0].store.set("only", "here")
    assert not other[0].store.check(["only"])


def test_a_derived_port_of_another_program_is_passed_over():
    """It accepts connections and says nothing."""
    first, second = free_ports(2)
    with socket.create_server(("127.0.0.1", first)):
        assert shared(meeting(world(0, 2, first, second), world(1, 2, first, second)))


def test_a_rank_of_another_run_is_told_whose_port_it_is():
    (port,) = free_ports(1)
    own = meeting(world(0, 2, port, job="own"), world(1, 2, port, job="own"))
    assert shared(own)
    (told,) = meeting(world(1, 2, port, job="other"))
    assert "rank 1 of 2 could not join the world of pmi" in told
    assert "belongs to a run of user" in told
    assert "by pmi own" in told
    assert "set MASTER_PORT to another port" in told


def test_a_participants_text_tells_runs_and_processes_apart():
    own = Participant(1, 2, "pmi", "7", 0, "here", "process 5 on node", "token")
    assert Participant.read(own.text()) == own
    for run, process, changed in (
        (True, True, {"rank": 0, "token": "another", "world_size": 3}),
        (True, False, {"process": "process 6 on node"}),
        (True, False, {"host": "there"}),
        (True, False, {"host": "there", "user": 1}),  # numbers of users mean nothing on another host
        (False, True, {"user": 1}),
        (False, True, {"job": "8"}),
        (False, True, {"launcher": "slurm"}),
    ):
        other = replace(own, **changed)
        assert (own.is_of_run(other), own.is_process_of(other)) == (run, process), changed
    assert own.run == "a run of user 0 by pmi 7, of which rank 1 is process 5 on node"
    assert replace(own, job="").run == "a run of user 0 by pmi, of which rank 1 is process 5 on node"
    assert own.contradiction(replace(own, rank=0)) == ""
    with pytest.raises(CommunicationError, match="the store has '5' where a rank should be described"):
        Participant.read("5")


def test_a_process_may_meet_again_while_its_store_lives():
    """Something of the first run keeps the store; no port is free but that one."""
    (port,) = free_ports(1)
    first = meeting(world(0, 2, port), world(1, 2, port))
    again = meeting(world(0, 2, port), world(1, 2, port))
    assert shared(first)
    assert shared(again)
    again[0].store.set("only", "in the second")
    assert not first[0].store.check(["only"])


def test_rank_0_says_whose_port_it_cannot_have():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (told,) = meeting(world(0, 2, port))
        assert f"port {port} is taken by another program: end it, or set MASTER_PORT" in told


def test_two_processes_of_one_rank_end_the_run_with_a_sentence():
    (port,) = free_ports(1)
    results = meeting(*(world(rank, 3, port) for rank in (0, 1, 1)))
    assert all("two processes are rank 1 of 3, process" in str(one) for one in results), results


def test_a_second_rank_0_ends_the_run_with_a_sentence():
    (port,) = free_ports(1)
    own = Participant.of(world(0, 2, port))
    second = replace(own, process="another process", token="another")

    def look() -> Participant:
        while (holder := rendezvous._holder("127.0.0.1", port, second)) is None:
            time.sleep(0.01)
        return holder

    told, holder = outcomes(lambda: meet(world(0, 2, port), 20.0), look)
    assert f"two processes are rank 0 of 2, {own.process} and another process: start each" in told
    assert holder.is_process_of(own)


def test_ranks_of_worlds_of_two_sizes_end_with_a_sentence():
    (port,) = free_ports(1)
    results = meeting(world(0, 2, port), world(2, 3, port))
    assert all("is one of 2 ranks, and rank 2" in str(one) for one in results), results


def test_missing_ranks_are_named_on_all_others():
    (port,) = free_ports(1)
    results = meeting(world(0, 4, port), world(2, 4, port), timeout=0.5)
    assert all("rank 1, 3 did not arrive" in str(one) for one in results), results


def test_a_missing_rank_0_is_a_sentence():
    """A rank whose rank 0 does not listen raises an error that says where nothing answers."""
    (port,) = free_ports(1)
    (told,) = meeting(world(1, 2, port), timeout=0.3)
    assert f"nothing answers at port {port} of 127.0.0.1 (Connection refused): see whether rank 0" in told


def test_a_host_without_an_address_is_named(capsys: pytest.CaptureFixture[str]):
    began = time.monotonic()
    (told,) = meeting(world(1, 2, 4000, host="node7.invalid"), timeout=0.3)
    assert "the host of rank 0, node7.invalid, has no address on" in told
    assert re.search(r" \([^\[(]*[nN]ame[^\[(]*\): add it to the name server", told), told
    assert time.monotonic() - began < 15
    assert capsys.readouterr().err.startswith("plait: node7.invalid, the host of rank 0, has no address")


@NEEDS_TWO_USERS
def test_a_port_of_another_user_is_no_rendezvous():
    """It has taken the port before rank 0 came, and would say whatever a rank wants to hear."""
    first, second = free_ports(2)
    with process_of_another_user(
        lambda: dist.TCPStore("127.0.0.1", first, None, True, wait_for_workers=False)
    ):
        assert shared(meeting(world(0, 2, first, second), world(1, 2, first, second)))
        (told,) = meeting(world(1, 2, first), timeout=0.3)
        assert f"port {first} of 127.0.0.1 belongs to user 65534" in told


def test_a_store_that_has_gone_is_noticed_without_asking_it(capfd: pytest.CaptureFixture[str]) -> None:
    """torch would print a page of frames for each rank, above the sentence that says which rank has ended."""
    (port,) = free_ports(1)
    with forked_process(lambda: run_store.listen("127.0.0.1", port)):
        client = run_store.connect("127.0.0.1", port)
        log = FailureLog(dist.PrefixStore("run", client), 1)
        assert not run_store.is_gone(client)
    assert run_store.is_gone(client)
    log.record("1F0 from rank 0", (0,))
    assert log.search((0,), 0.0).silent == (0,)
    assert f":{port}" not in capfd.readouterr().err  # a store of an earlier test may be told of meanwhile


def participant(rank: int, token: str) -> Participant:
    return replace(Participant.of(world(rank, 2, 1)), token=token, process=f"process {token} on here")


def report(store: dist.Store, own: Participant, deadline: float = 20.0) -> Meeting:
    now = time.monotonic()
    return rendezvous._ask(store, own, now + 20, now + deadline, replaces=True)


def gather(store: dist.Store, own: Participant) -> Meeting:
    return rendezvous._gather(store, own, time.monotonic() + 20, replaces=True)


@pytest.fixture
def agents_store() -> dist.Store:
    """As torchrun's agent has it: the same for all attempts of a run."""
    return dist.HashStore()


def test_restarted_ranks_do_not_read_what_was_written_before(agents_store: dist.Store):
    """Rank 1 comes first, and reads the number of the attempt before."""
    for attempt in range(5):
        zero, one = (participant(rank, f"{attempt}-{rank}") for rank in range(2))

        def late(zero: Participant = zero) -> Meeting:
            time.sleep(0.05)
            return gather(agents_store, zero)

        results = outcomes(lambda one=one: report(agents_store, one), late)
        assert shared(results)
        assert not results[0].store.check(["written before"])
        results[0].store.set("written before", "")


def test_a_rank_that_was_not_restarted_follows_to_the_next_attempt(agents_store: dist.Store):
    """Rank 0 is gone before it has answered; hosts restart their ranks one after the other."""
    agents_store.add(rendezvous._ATTEMPTS, 1)
    agents_store.set(rendezvous._CURRENT, json.dumps(["plait/1", participant(0, "gone").text()]))

    def restarted() -> Meeting:
        agents_store.wait(["plait/1/arrival/1"])
        return gather(agents_store, participant(0, "restarted"))

    assert shared(outcomes(lambda: report(agents_store, participant(1, "waits")), restarted))


def test_of_two_processes_of_a_restarted_rank_the_later_one_takes_part(agents_store: dist.Store):

    def later() -> Meeting:
        agents_store.wait(["plait/1/arrival/1"])
        return report(agents_store, replace(participant(1, "later"), world_size=3))

    first = replace(participant(1, "first"), world_size=3)
    zero, two = (replace(participant(rank, str(rank)), world_size=3) for rank in (0, 2))

    def last() -> Meeting:
        agents_store.wait(["plait/1/arrival/2"])
        return report(agents_store, two)

    told, *others = outcomes(
        lambda: report(agents_store, first, 0.2), later, lambda: gather(agents_store, zero), last
    )
    assert "rank 0 does not answer" in told
    assert shared(others)
