"""The rendezvous: the ranks of a run, and no others, identify themselves in a store until all are there.

1. Rank 0 takes the next number of an attempt, and writes it with what identifies the run: `plait/current`.
2. Every other rank reads that, compares the run with its own, and writes that it has arrived in this attempt.
3. Rank 0 answers each rank once all have arrived: that it takes part, or why nobody does.

The keys of an attempt have a prefix of their own, since the store of torchrun's agent outlives the ranks: a
restarted rank would find the addresses of dead ones there. A rank that has read an older number goes on when
rank 0 writes the next one. torchrun's own number, `TORCHELASTIC_RESTART_COUNT`, differs between hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from itertools import count, cycle
from typing import NamedTuple, Self

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from plait.errors import CommunicationError, listed
from plait.ranks.launcher_environment import World
from plait.ranks.run_store import connect, listen, require_known, server_at
from plait.ranks.transport.shared_memory.host_discovery import host_identity


@dataclass(frozen=True)
class Participant:
    """What identifies a rank in a rendezvous: its number, its run, its host and its process."""

    rank: int
    world_size: int
    launcher: str
    job: str
    user: int
    host: str
    """The identity of its host: equal for processes that reach each other by its loopback interface."""
    process: str
    token: str
    """A random text: another for each process, and for each rendezvous of a process."""

    @classmethod
    def of(cls, world: World) -> Self:
        """Return the identity of this process as a rank of `world`."""
        host = " ".join(value for name, value in host_identity().items() if name != "owner")
        process, token = f"process {os.getpid()} on {socket.gethostname()}", secrets.token_hex(8)
        return cls(
            world.rank, world.world_size, world.launcher, world.job, os.geteuid(), host, process, token
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the participant that `text` describes. Raises `CommunicationError` for other text."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            raise CommunicationError(
                f"the store has {text[:100]!r} where a rank should be described"
            ) from None

    def text(self) -> str:
        """Return this participant as text, which `read` takes."""
        return json.dumps(asdict(self))

    @property
    def run(self) -> str:
        """Text that names the run of this rank, with user, launcher and process, for messages."""
        job = f" {self.job}" if self.job else ""
        return (
            f"a run of user {self.user} by {self.launcher}{job}, of which rank {self.rank} is {self.process}"
        )

    def is_of_run(self, other: Participant) -> bool:
        """Return whether both were started by one launcher in one job, by one user where on one host."""
        one_user = self.user == other.user or self.host != other.host
        return (self.launcher, self.job) == (other.launcher, other.job) and one_user

    def is_process_of(self, other: Participant) -> bool:
        """Return whether both are the same process."""
        return (self.process, self.host) == (other.process, other.host)

    def contradiction(self, other: Participant) -> str:
        """Return why the ranks of one run cannot be this one and `other`; "" if they can."""
        if other.world_size != self.world_size:
            return (
                f"rank {self.rank} ({self.process}) is one of {self.world_size} ranks, and rank "
                f"{other.rank} ({other.process}) one of {other.world_size}: start all with one number."
            )
        return ""


_CURRENT = "plait/current"
_ATTEMPTS = "plait/attempts"
_PERIOD, _PERIOD_A_RANK = 0.005, 1e-4
"""Seconds between two looks at a key, and what each rank of the world adds to them: rank 0 serves all."""
_PATIENCE = 3.0
"""Seconds that an earlier run, or another one, is given to leave a port."""
_SECONDS_TO_READ = 2.0
"""For the other ranks to read why nobody takes part, before rank 0 and its store are gone."""


class Meeting(NamedTuple):
    """The result of a rendezvous: the key-value store of this run, and whether all ranks are on one host."""

    store: Store
    on_one_host: bool


class _StoreOfAnotherRun(Exception):
    """Raised where a store belongs to another run."""


def meet(world: World, timeout: float) -> Meeting:
    """Block until all ranks of the run are there; return their key-value store. Every rank calls it.

    Raises `CommunicationError` on every rank where one is missing for `timeout` seconds, where two processes
    are one rank, or disagree on the size of the world; on some ranks where a port is another run's.
    """
    deadline, own = time.monotonic() + timeout, Participant.of(world)
    try:
        host, ports = _address(world)
        require_known(host, deadline)
        if world.rank:
            return _report(world, own, deadline)
        store = _connected(host, ports[0], deadline) if world.agent_store else _open(host, ports, own)
        return _gather(store, own, deadline, replaces=world.agent_store)
    except (CommunicationError, RuntimeError) as error:
        raise CommunicationError(
            f"rank {world.rank} of {world.world_size} could not join the world of {world.launcher} at "
            f"{world.init_method}: {str(error).partition(chr(10))[0]}"
        ) from error


def _address(world: World) -> tuple[str, tuple[int, ...]]:
    host, _, port = world.init_method.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), (int(port), *world.further_ports)


def _open(host: str, ports: tuple[int, ...], own: Participant) -> Store:
    """Return the store of rank 0, at the first free port. Raises `CommunicationError` where none is."""
    taken: dict[int, str] = {}
    until = time.monotonic() + _PATIENCE
    for port in cycle(ports):
        if (store := listen(host, port)) is not None:
            return store
        holder = _holder(host, port, own)
        if holder is not None and holder.is_process_of(own):
            return server_at(host, port)
        taken[port] = f"port {port} is taken by {'another program' if holder is None else holder.run}"
        if len(taken) < len(ports):
            continue
        if time.monotonic() > until:
            raise CommunicationError(f"{listed([*taken.values()])}: end it, or set MASTER_PORT to another.")
        time.sleep(0.1)
    raise AssertionError("ports are tried again and again")


def _holder(host: str, port: int, own: Participant) -> Participant | None:
    """Return rank 0 of the run whose store listens at a port; None if that store is not plait's.

    Where that waits for ranks of the same run, it learns that there is this second rank 0.
    """
    store = connect(host, port)
    if isinstance(store, str) or (current := _read(store, _CURRENT, time.monotonic() + 0.5)) is None:
        return None
    attempt, text = json.loads(current)
    holder = Participant.read(text)
    if holder.is_of_run(own) and not holder.is_process_of(own):
        _arrive(store, attempt, own)
    return holder


def _gather(store: Store, own: Participant, deadline: float, *, replaces: bool) -> Meeting:
    """Begin an attempt as rank 0, wait until all ranks have arrived, and answer them.

    `replaces`: whether a second process of a rank takes the place of the first, as of a restarted host.
    """
    attempt = f"plait/{store.add(_ATTEMPTS, 1)}"
    store.set(_CURRENT, json.dumps([attempt, own.text()]))
    ranks, arrived, problem = {0: own}, set[str](), ""
    for number in count(1):
        if problem or len(ranks) == own.world_size:
            break
        text = _read(store, f"{attempt}/arrival/{number}", deadline, own.world_size)
        if text is None:
            missing = listed([str(rank) for rank in range(own.world_size) if rank not in ranks])
            problem = f"rank {missing} did not arrive: start all ranks, and see what they print."
            break
        other = Participant.read(text)
        problem, first = own.contradiction(other), ranks.get(other.rank, other)
        if not (replaces or problem or first.token == other.token):
            problem = (
                f"two processes are rank {other.rank} of {other.world_size}, {first.process} and "
                f"{other.process}: start each rank once, and give each run a MASTER_PORT of its own."
            )
        ranks[other.rank] = other
        arrived.add(other.token)
    on_one_host = len({one.host for one in ranks.values()}) == 1
    for rank in range(max(own.world_size, max(ranks) + 1)):
        member = ranks.get(rank, own)
        token = "" if problem else member.token
        store.set(f"{attempt}/answer/{rank}", json.dumps([token, member.process, on_one_host, problem]))
    if problem:
        if arrived:
            _read(store, f"{attempt}/read/{len(arrived)}", time.monotonic() + _SECONDS_TO_READ)
        raise CommunicationError(problem)
    return Meeting(PrefixStore(attempt, store), on_one_host)


def _report(world: World, own: Participant, deadline: float) -> Meeting:
    """Find the store of rank 0, report there as another rank, and return what rank 0 answers."""
    host, ports = _address(world)
    failures: dict[int, str] = {}
    others_leave_by = time.monotonic() + _PATIENCE
    for port in cycle(ports):
        store = connect(host, port)
        try:
            if isinstance(store, str):
                failures[port] = store
            else:
                waits = world.agent_store or len(ports) == 1
                begun_by = deadline if waits else time.monotonic() + _PATIENCE
                return _ask(store, own, begun_by, deadline, replaces=world.agent_store)
        except _StoreOfAnotherRun as error:
            failures[port] = str(error)
            if len(ports) == 1 and time.monotonic() > others_leave_by:
                raise CommunicationError(str(error)) from None
        except DistError:  # it was the store of an earlier run, or rank 0 is gone
            failures[port] = f"the store at port {port} of {host} was closed"
        if time.monotonic() > deadline:
            raise CommunicationError(f"{listed([*failures.values()])}: see whether rank 0 has started.")
        time.sleep(10 * _PERIOD)
    raise AssertionError("ports are tried again and again")


def _ask(store: Store, own: Participant, begun_by: float, deadline: float, *, replaces: bool) -> Meeting:
    """Register this rank in the current restart attempt, or the next ones, until rank 0 answers.

    `begun_by`: when rank 0 of a run of plait has begun the first one. Raises `_StoreOfAnotherRun` where the
    store is not this run's, `CommunicationError` where rank 0 refuses.
    """
    patience, attempt = time.monotonic() + _PATIENCE, ""
    while time.monotonic() < deadline + _SECONDS_TO_READ:
        current = _read(store, _CURRENT, begun_by, own.world_size)
        if current is None:
            raise _StoreOfAnotherRun("the store there is not one of plait")
        newest, text = json.loads(current)
        if newest != attempt:
            first = Participant.read(text)
            if not first.is_of_run(own):
                told = f"the store there belongs to {first.run}: set MASTER_PORT to another port"
                raise _StoreOfAnotherRun(told)
            attempt = newest
            _arrive(store, attempt, own)
        time.sleep(_PERIOD + _PERIOD_A_RANK * own.world_size)
        if not store.check([key := f"{attempt}/answer/{own.rank}"]):
            continue
        token, process, on_one_host, problem = json.loads(store.get(key))
        if problem:
            store.set(f"{attempt}/read/{store.add(f'{attempt}/reads', 1)}", "")
            raise CommunicationError(problem)
        if token == own.token:
            return Meeting(PrefixStore(attempt, store), on_one_host)
        if not replaces and process != own.process and time.monotonic() > patience:
            raise CommunicationError(
                f"that run has another rank {own.rank}, {process}: start each rank once, and give each run a "
                "MASTER_PORT of its own."
            )
    raise CommunicationError("rank 0 does not answer: see what it prints.")


def _arrive(store: Store, attempt: str, own: Participant) -> None:
    store.set(f"{attempt}/arrival/{store.add(f'{attempt}/arrivals', 1)}", own.text())


def _read(store: Store, key: str, deadline: float, ranks: int = 1) -> str | None:
    """Return the text at a key, once it is there; None where it is not before the deadline.

    Asks again and again, since torch prints warnings where a wait of its own ends; `ranks` do so together.
    """
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_PERIOD + _PERIOD_A_RANK * ranks)
    return bytes(store.get(key)).decode()


def _connected(host: str, port: int, deadline: float) -> Store:
    """Return a client of the store of torchrun's agent."""
    while isinstance(store := connect(host, port), str):
        if time.monotonic() > deadline:
            raise CommunicationError(f"{store}: see whether torchrun runs there.")
        time.sleep(10 * _PERIOD)
    return store
