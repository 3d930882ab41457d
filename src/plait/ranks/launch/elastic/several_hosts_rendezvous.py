"""`SeveralHostsRendezvous`: torch's rendezvous interface for the supervisors of several hosts.

torch's own (`DynamicRendezvousHandler`) looks once a second whether anything has changed, gives a host up
after 15 seconds, and lets both sides of a cut network go on.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from plait.errors import CommunicationError, MeshError, PlaitError, RankError, listed
from plait.ranks import json_serialization
from plait.ranks.failure.rank_failure import RankFailure
from plait.ranks.json_serialization import NotPlainError
from plait.ranks.launch.elastic.host_hub import HostHub, HostRun, known_of, world_of
from plait.ranks.launch.elastic.host_link import (
    MOST_BYTES,
    SILENCE,
    HostLink,
    Message,
    ask_host,
    connect_to_host,
)
from plait.ranks.launch.elastic.host_quorum import HostWorld, KnownWorlds
from plait.ranks.launch.elastic.meeting_address_search import HubPlace, searching
from plait.ranks.launch.rank_job import unpickled_result
from plait.ranks.run_store import is_loopback, listening_socket, plain_address, require_known

_PAUSE = 0.1
"""Seconds between two tries to reach another host."""


@dataclass(frozen=True)
class HostPlace:
    """The number of this host, and the address at which the supervisors of all hosts connect at first."""

    number: int
    first_host: str
    """The name or address of host 0."""
    ports: tuple[int, ...]
    """At which host 0 listens, the others likewise where `hosts` are known: the first that is free."""
    hosts: tuple[str, ...] = ()
    """The names or addresses of all hosts, by their numbers; () where only that of host 0 is known."""


class SeveralHostsRendezvous(RendezvousHandler):
    """Rendezvous handler for one of several hosts: agrees with the others on the world of each generation."""

    def __init__(
        self, place: HostPlace, run: HostRun, ready: int, limit: float, silence: float = SILENCE
    ) -> None:
        """Listen for other hosts. `ready`: how many processes this host has to offer.

        `limit`: seconds that it waits for other hosts. `silence`: seconds after which one counts as gone.
        Raises MeshError where all ports are taken.
        """
        self._place, self._run, self._limit, self._silence = place, run, limit, silence
        self.ready = ready
        """How many processes this host has to offer for the next world."""
        self._token = secrets.token_hex(8)
        self.name = ""
        """The random name of the run, the same on all hosts."""
        self._hub = HostHub(place.number, self._listener(), run, silence, self._hear_end)
        self._own_address = place.first_host if place.number == 0 else ""
        """That at which the other hosts reach this one."""
        self._own_addresses: list[str] | None = None
        """Those of this host's names, at one of which Gloo listens by default; None: not looked up yet."""
        self._changed = threading.Condition()
        self._news = os.eventfd(0, os.EFD_NONBLOCK)
        self._link: HostLink | None = None
        self._at = 0
        """The host of the hub that it is connected to."""
        self._at_generation = 0
        """The number of the world for which it has connected there."""
        self._elsewhere: HubPlace | None = None
        """Where a newer world has met than this host knows."""
        self._world: HostWorld | None = None
        self._known = KnownWorlds()
        """That world, and those that this host has accepted since: they may have begun on others."""
        self._about: dict[int, Message] = {}
        """The addresses of the world's hosts, and of their hubs."""
        self._reason = ""
        """Why this host has to stop, and join the next world; "" while it has not."""
        self._awaited, self._is_spare = "", False
        self._waiting: dict[int, tuple[bool, bool]] = {}
        self._failure: Message | None = None
        self._end_message: Message | None = None
        self._all_told = False
        """Whether the hub has said that all hosts have received it."""
        self._is_shut = False
        self._done = 0
        """The generation whose results the hub has."""
        self._most = ready
        self._could, self._larger = 0, 0
        """How many processes the hub was told of, and the ranks of a larger world, 0: there is none."""

    def _listener(self) -> socket.socket:
        """Return a socket that listens: on host 0 at a port that others know, else there, or at any port."""
        is_first, own = self._place.number == 0, self._name_of(self._place.number)
        for port in self._place.ports if is_first else (*(self._place.ports if own else ()), 0):
            listener = listening_socket(own, port)
            if listener is not None:
                if own and not port:
                    taken = listed([str(port) for port in self._place.ports])
                    line = f"plait: port {taken} is taken on host {self._place.number}: hosts that are"
                    print(f"{line} started again do not find it.", file=sys.stderr, flush=True)
                return listener
        ports = listed([str(port) for port in self._place.ports])
        raise MeshError(
            f"the supervisor of host 0 cannot listen at port {ports}: set MASTER_PORT to another."
        )

    @property
    def generation(self) -> int:
        """The number of the current world, from 1; 0 before the first one."""
        return 0 if self._world is None else self._world.generation

    @property
    def world(self) -> HostWorld:
        """The hosts and ranks of the current generation."""
        assert self._world is not None, "the hosts have met"
        return self._world

    @property
    def address(self) -> str:
        """The address at which ranks find the store, `tcp://HOST:PORT`."""
        return self.world.store

    @property
    def other_hosts(self) -> frozenset[str]:
        """The addresses of the other hosts of the current world."""
        own = self._place.number
        found = {each for host, one in self._about.items() if host != own for each in one["addresses"]}
        on_one_host = is_loopback(self._place.first_host)
        return frozenset(each for each in found if on_one_host or not is_loopback(each))

    @property
    def handles(self) -> tuple[int, ...]:
        """File descriptors that become readable when other hosts change the run."""
        return (self._news,)

    @property
    def results(self) -> list[Any]:
        """The results of all ranks, after `finish` has returned True."""
        assert self._end_message is not None, "`finish` returned True"
        return [json_serialization.decode(text) for text in self._end_message["results"]]

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until the hosts have agreed on the next world; return torch's `RendezvousInfo`.

        Raises RankError where another host ends the run, CommunicationError where too few hosts of the last
        world can be reached within the limit.
        """
        deadline = time.monotonic() + self._limit
        if self._world is None:
            require_known(self._place.first_host, deadline)
        with searching(self._run.job, self._addresses, self._note_elsewhere):
            for hub in self._candidates():
                if self._link is None:
                    self._connect(self._take_elsewhere() or hub)
                if self._link is not None and self._meet(deadline):
                    break
                if self._end_message is not None:  # its hub is gone, too
                    self._raise_end(self._end_message)
                if self._is_spare:  # whose hub is gone
                    self._is_spare, deadline = False, time.monotonic() + self._limit
                self._require_time(deadline)
                time.sleep(_PAUSE)
        info = RendezvousStoreInfo(self._place.first_host, self._place.ports[0])
        return RendezvousInfo(HashStore(), 0, 1, info)

    def _candidates(self) -> Iterator[HubPlace]:
        """Yield the hubs to connect to, endlessly, the preferred ones first.

        First where the last world has met, then those of the hosts after it, if they can be a majority
        without that one: each host tries the same order.
        """
        while self._world is None:
            yield from (HubPlace(0, self._place.first_host, port, 0) for port in self._place.ports)
        hosts = self._world.hosts
        start = hosts.index(self._world.hub) if self._world.hub in hosts else 0
        while True:
            for number in (*hosts[start:], *hosts[:start]) if len(hosts) > 2 else (self._world.hub,):
                host, port = self._about[number]["hub"]
                yield HubPlace(number, host, port, self.generation)

    def _connect(self, hub: HubPlace) -> None:
        """Connect to a hub, if something listens there; it knows nothing of this host yet."""
        place, port = self._place, hub.port
        name = self._name_of(hub.number) or hub.host  # the host may have got another address since
        if hub.number == place.number:  # also where its name is unknown, since it is cut off
            self._own_address = self._own_address or name
            name, port = name if is_loopback(name) else "127.0.0.1", self._hub.port
        connected = connect_to_host(name, port, min(2.0, self._silence))
        if connected is not None:
            with self._changed:
                self._link = HostLink(connected, self._receive, self._silence)
                self._at, self._at_generation = hub.number, hub.generation
                if self._elsewhere is not None and self._elsewhere.generation <= hub.generation:
                    self._elsewhere = None  # found again while this host was on its way
                if hub.number != self._place.number:
                    self._own_address = self._link.address
            self._link.start()

    def _name_of(self, number: int) -> str:
        """Return the name or address of a host as it was given; "" where it was not."""
        names = (self._place.first_host, *self._place.hosts[1:])
        return names[number] if number < len(names) else ""

    def _take_elsewhere(self) -> HubPlace | None:
        with self._changed:
            found, self._elsewhere = self._elsewhere, None
        return None if found is None or found.generation <= self.generation else found

    def _addresses(self) -> list[tuple[str, int]]:
        """Return the addresses and ports at which supervisors of other hosts may listen."""
        own, place = self._place.number, self._place
        names = [host for number, host in enumerate(place.hosts) if number != own]
        if own and place.first_host not in names:
            names.insert(0, place.first_host)
        found = [(host, port) for host in names for port in place.ports]
        with self._changed:
            found += [tuple(about["hub"]) for number, about in self._about.items() if number != own]
        return list(dict.fromkeys(found))

    def _note_elsewhere(self, hub: HubPlace) -> None:
        """Leave for a hub, at the next moment, where a newer world has met than this host knows.

        That may be its own, from before it was started again: there the others wait for it.
        """
        with self._changed:
            is_connected = self._link is not None
            known = max(self.generation, self._at_generation if is_connected else 0)
            if hub.generation > known and not (is_connected and hub.number == self._at):
                self._elsewhere = hub
                self._changed.notify_all()

    def _meet(self, deadline: float) -> bool:
        """Join at the connected hub, and block; return True with the next world, False to try another hub.

        One is left where it is gone, where a newer world has met elsewhere, or, unless the last world has met
        there, where too few others come. Raises RankError where another host ends the run.
        """
        before, until = self.generation, time.monotonic() + 4 * self._silence
        stays = self._world is None or self._at == self._world.hub or self._at_generation > before
        self._join()
        with self._changed:
            while self._link is not None and self.generation == before and self._end_message is None:
                now = time.monotonic()
                if not self._is_spare and (now > deadline or (now > until and not stays)):
                    break
                if self._elsewhere is not None:
                    break
                self._changed.wait(_PAUSE)
            if self._end_message is not None:
                self._raise_end(self._end_message)
            link = self._link
            if self.generation > before or link is None or (stays and self._elsewhere is None):
                return self.generation > before
            self._link = None
        link.close()
        return False

    def _join(self) -> None:
        """Tell the hub that this host has stopped its ranks, and how many processes it can offer."""
        with self._changed:
            self._reason, self._waiting, self._awaited, self._is_spare = "", {}, "", False
            link = self._link
        if link is None:
            return
        if self._own_addresses is None:  # once: a host that is cut off might wait for a name server
            self._own_addresses = _addresses_of(socket.gethostname()) + _addresses_of(self._own_address)
        addresses = list(dict.fromkeys((link.address, *self._own_addresses)))
        link.about = {}
        link.send(
            {
                "kind": "join",
                "job": self._run.job,
                "name": self.name,
                "host": self._place.number,
                "token": self._token,
                "ready": self.ready,
                "most": self._most,
                "known": asdict(self._known),
                "about": {"addresses": addresses, "hub": (self._own_address, self._hub.port)},
            }
        )

    def _raise_end(self, message: Message) -> None:
        """Raise RankError if another host has failed; after results, what ends torch's agent normally."""
        if message["kind"] == "finished":
            raise RendezvousGracefulExitError("the run has finished")
        raise RankError(f"{message['why']}.", -1, "")

    def _require_time(self, deadline: float) -> None:
        """Raise CommunicationError, with the hosts that are missing, after the deadline."""
        if time.monotonic() <= deadline or self._is_spare:
            return
        own, limit = f"host {self._place.number}", f"{self._limit:g} s"
        if self._world is None:
            where = f"{self._place.first_host}:{self._place.ports[0]}"
            missing = f"{self._awaited} did not come" if self._awaited else "nothing of this run answers"
            raise CommunicationError(
                f"{own} of {self._run.hosts} has waited for the others at {where} for {limit}, and "
                f"{missing}: start plait once on each host, and see what they print."
            )
        unreached = [f"host {host}" for host in self._world.hosts if host != self._place.number]
        missing = self._awaited or listed(unreached)
        raise CommunicationError(
            f"{own} does not go on, since no majority of the {len(self._world.hosts)} hosts of the last "
            f"world has met for {limit} ({missing} cannot be reached): start the run again, with run.resume "
            "= auto."
        )

    def _receive(self, link: HostLink, message: Message | None) -> None:
        """Handle a message of the hub, None when the connection has ended; called by its thread."""
        with self._changed:
            if link is not self._link:
                return
            kind = "gone" if message is None else message["kind"]
            if message is None or kind == "refused":
                self._link = None
                self._reason = f"host {self._at}, where the hosts have met, cannot be reached"
            elif kind == "propose":
                self._known = self._known.merged(known_of(message["known"]))
                link.send({"kind": "accept", "generation": self._known.generation})
            elif kind == "world" and message["generation"] > self.generation:
                self._begin(message)
            elif kind == "larger" and message["generation"] == self.generation:
                self._larger = message["ranks"]
            elif kind == "restart" and message["generation"] == self.generation:
                self._reason = self._reason or message["why"]
            elif kind == "waits":
                self._awaited, self._is_spare = message["why"], message["is_spare"]
            elif kind == "failed":
                self._failure = _merged(self._failure, message)
            elif kind == "waiting":
                self._waiting = {int(host): (one[0], one[1]) for host, one in message["hosts"].items()}
            elif kind in ("end", "finished", "replaced"):
                self._end_message = message
                link.send({"kind": "told"})
            elif kind == "all told":
                self._all_told = True
            if kind in ("gone", "refused", "restart", "end", "finished", "replaced"):
                os.eventfd_write(self._news, 1)
            self._changed.notify_all()
        if kind == "refused":
            link.close()

    def _begin(self, message: Message) -> None:
        """Set the current world to that of a message, and reset what was known of the one before."""
        self._world, self.name, self._reason = world_of(message), str(message["name"]), ""
        self._known = KnownWorlds(self._world)
        self._waiting, self._could, self._larger = {}, 0, 0
        self._about = {int(host): about for host, about in message["about"].items()}
        host, port = self._about[self._world.hub]["hub"]
        self._hub.met = HubPlace(self._world.hub, host, port, self.generation)
        self._elsewhere = None

    def ranks(self, ready: int) -> tuple[range, int]:
        """Return the ranks of this host in the current world, and how many there are on all hosts."""
        return self.world.ranks_of(self._place.number), self.world.size

    def larger_world(self, processes: int) -> int:
        """Send how many processes could be ranks here; return how many ranks a larger world would have.

        0: none is possible. With `HostRun.grows_later`.
        """
        with self._changed:
            changed, self._could = processes != self._could, processes
            larger = self._larger
        if changed:
            self._send({"kind": "ready", "generation": self.generation, "processes": processes})
        return larger

    def report(self, failure: RankFailure, last_good_step: int | None, ranks: Sequence[int] = ()) -> None:
        """Send the other hosts the failure of a rank here."""
        what = failure.summary.splitlines()[0] if failure.summary else "failed"
        self._send(
            {
                "kind": "failed",
                "rank": failure.rank,
                "summary": what,
                "last_good_step": last_good_step,
                "ranks": list(ranks),
            }
        )

    def failure_elsewhere(self) -> tuple[str, int | None, list[int]] | None:
        """Return another host's failure, once: its text, the last good step and ranks with wrong bits.

        Each failure once; None where there is no other one.
        """
        with self._changed:
            found, self._failure = self._failure, None
        if found is None:
            return None
        told = f"rank {found['rank']} of host {found['host']} {found['summary']}"
        return told, found["last_good_step"], found["ranks"]

    def reason(self) -> str:
        """Return why this host has to stop and join the next world; "" where it has not."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with self._changed:
            if self._end_message is not None:
                return "" if self._end_message["kind"] == "finished" else str(self._end_message["why"])
            return self._reason

    def exchange_waiting(self, some: bool, each: bool) -> tuple[bool, bool]:
        """Send whether some and all ranks here wait too long; return the same of the other hosts.

        Returns whether some on other hosts do, and whether all do that have not ended, and no host before
        this one has any: the first that has, chooses which of its ranks has failed.
        """
        with self._changed:
            own, link, told = self._place.number, self._link, self._waiting
        if link is not None:
            link.about = {"waits": (some, each)}
        others = {host: told.get(host, (False, False)) for host in self.world.hosts if host != own}
        is_first = not any(some for host, (some, _) in others.items() if host < own)
        return any(some for some, _ in others.values()), is_first and all(each for _, each in others.values())

    def finish(self, results: Sequence[bytes]) -> bool:
        """Send the pickled results of this host's ranks; return whether all hosts have sent theirs.

        Raises PlaitError for a result that cannot be read here, or is no number, text, tensor, or container
        of them.
        """
        if self._done < self.generation:
            texts = [
                _plain(unpickled_result(one, rank), rank)
                for one, rank in zip(results, self.ranks(0)[0], strict=True)
            ]
            if sum(map(len, texts)) > MOST_BYTES // 2:
                raise PlaitError(
                    f"the results of host {self._place.number}, which all hosts get, are larger than "
                    f"{MOST_BYTES // 2:,} bytes: return less, and write the rest to files."
                )
            self._send({"kind": "done", "generation": self.generation, "results": texts})
            self._done = self.generation
        with self._changed:
            return self._end_message is not None and self._end_message["kind"] == "finished"

    def end(self, why: str) -> None:
        """Tell the other hosts that the run ends, and why; wait a moment until the hub has passed it on."""
        self._send({"kind": "end", "why": why})
        with self._changed:  # until the hub has told all: it may end with this process
            self._changed.wait_for(lambda: self._end_message is not None or self._link is None, self._silence)

    def _hear_end(self, name: str, message: Message) -> None:
        """Store the message that ends the run, passed on by a host after the hub was lost."""
        with self._changed:
            if name and name == self.name and self._end_message is None and not self._is_shut:
                self._end_message, self._all_told = message, True  # the others pass it on, too
                os.eventfd_write(self._news, 1)
                self._changed.notify_all()

    def _pass_end_on(self) -> None:
        """Wait until all hosts know of the run's end; where their hub is lost meanwhile, tell them."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_told or self._link is None, self._silence)
            end, is_lost = self._end_message, self._link is None and not self._all_told
        if end is None or not is_lost or self._world is None:
            return
        message = {"kind": "ended", "job": self._run.job, "name": self.name, "end": end}
        deadline = time.monotonic() + 2 * self._silence
        for number in self._world.hosts:
            if number not in (self._place.number, self._at) and time.monotonic() < deadline:
                host, port = self._about[number]["hub"]
                ask_host(self._name_of(number) or host, port, message, "told", min(2.0, self._silence))

    def _send(self, message: Message) -> None:
        with self._changed:
            link = self._link
        if link is not None:
            link.send(message)

    def get_backend(self) -> str:
        """Return the name of the kind of rendezvous, for torch's events."""
        return "plait-hosts"

    def get_run_id(self) -> str:
        """Return the run's random name, as torch's agent asks for it."""
        return self.name

    def num_nodes_waiting(self) -> int:
        """Return 1 where this host has to stop and join the next world, else 0."""
        return int(bool(self.reason()))

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return self._end_message is not None

    def set_closed(self) -> None:
        """Do nothing, though torch's interface has it: `end` tells other hosts that the run ends, and why."""

    def shutdown(self) -> bool:
        """Send remaining messages, close the connections to other hosts, and return True."""
        if not self._is_shut and self._end_message is not None and self._end_message["kind"] != "replaced":
            self._pass_end_on()
        with self._changed:
            link, self._link, is_shut, self._is_shut = self._link, None, self._is_shut, True
        if link is not None:
            link.close()
        self._hub.close()
        if not is_shut:
            os.close(self._news)
        return True


def _addresses_of(name: str) -> list[str]:
    """Return the addresses of a name; none where it is unknown."""
    with suppress(OSError, UnicodeError):
        return [plain_address(str(one[4][0])) for one in socket.getaddrinfo(name, None)]
    return []


def _plain(result: object, rank: int) -> str:
    try:
        return json_serialization.encode(result)
    except NotPlainError as error:
        raise PlaitError(
            f"rank {rank}'s result is a {error}, which elastic ranks do not send to other hosts: return "
            "numbers, text, tensors and containers of them."
        ) from None


def _merged(known: Message | None, message: Message) -> Message:
    """Return one message for two failures: the one with wrong bits; of two such, both joined in one."""
    if known is None or known["last_good_step"] is None:
        return message if known is None or message["last_good_step"] is not None else known
    if message["last_good_step"] is None:
        return known
    step = min(known["last_good_step"], message["last_good_step"])
    return {**message, "last_good_step": step, "ranks": sorted({*known["ranks"], *message["ranks"]})}
