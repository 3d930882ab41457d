"""`SeveralHostsRendezvous`: torch's rendezvous interface for the supervisors of several hosts.

torch's own (`DynamicRendezvousHandler`) looks once a second whether anything has changed, gives a host up
after 15 seconds, and lets both sides of a cut network go on.
"""

from __future__ import annotations

import os
import secrets
import socket
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
from plait.ranks import json_values
from plait.ranks.failure.failure_log import RankFailure
from plait.ranks.json_values import NotPlainError
from plait.ranks.launch.elastic.host_agreement import HostWorld
from plait.ranks.launch.elastic.host_hub import HostHub, HostRun, world_of
from plait.ranks.launch.elastic.host_link import MOST_BYTES, SILENCE, HostLink, Message, connect_to_host
from plait.ranks.launch.rank_job import unpickled_result
from plait.ranks.run_store import is_loopback, listening_socket, require_known

_PAUSE = 0.1
"""Seconds between two tries to reach another host."""


@dataclass(frozen=True)
class HostPlace:
    """The number of this host, and the address at which the supervisors of all hosts connect at first."""

    number: int
    first_host: str
    """The name or address of host 0."""
    ports: tuple[int, ...]
    """At which host 0 listens: the first that is free."""


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
        self._hub = HostHub(place.number, self._listener(), run, silence)
        self._own_address = place.first_host if place.number == 0 else ""
        """That at which the other hosts reach this one."""
        self._changed = threading.Condition()
        self._news = os.eventfd(0, os.EFD_NONBLOCK)
        self._link: HostLink | None = None
        self._at = 0
        """The host of the hub that it is connected to."""
        self._world: HostWorld | None = None
        self._about: dict[int, Message] = {}
        """The addresses of the world's hosts, and of their hubs."""
        self._reason = ""
        """Why this host has to stop, and join the next world; "" while it has not."""
        self._awaited, self._is_spare = "", False
        self._waiting: dict[int, tuple[bool, bool]] = {}
        self._failure: Message | None = None
        self._end_message: Message | None = None
        self._is_shut = False
        self._done = 0
        """The generation whose results the hub has."""

    def _listener(self) -> socket.socket:
        first = self._place.number == 0
        for port in self._place.ports if first else (0,):
            listener = listening_socket(self._place.first_host if first else "", port)
            if listener is not None:
                return listener
        ports = listed([str(port) for port in self._place.ports])
        raise MeshError(
            f"the supervisor of host 0 cannot listen at port {ports}: set MASTER_PORT to another."
        )

    @property
    def generation(self) -> int:
        """The number of the current world, the first is 1."""
        return 0 if self._world is None else self._world.generation

    @property
    def world(self) -> HostWorld:
        """The current world."""
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
        return [json_values.decode(text) for text in self._end_message["results"]]

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until the hosts have agreed on the next world; return what torch's agent asks for.

        Raises RankError where another host ends the run, CommunicationError where too few hosts of the last
        world can be reached within the limit.
        """
        deadline = time.monotonic() + self._limit
        if self._world is None:
            require_known(self._place.first_host, deadline)
        for number, host, port in self._candidates():
            if self._link is None:
                self._connect(number, host, port)
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

    def _candidates(self) -> Iterator[tuple[int, str, int]]:
        """Yield number, address and port of the hubs to connect to, endlessly, the preferred ones first.

        First where the last one has met, then those of the hosts after it, if they can be a majority without
        that one: each host tries the same order.
        """
        while self._world is None:
            yield from ((0, self._place.first_host, port) for port in self._place.ports)
        hosts = self._world.hosts
        start = hosts.index(self._world.hub) if self._world.hub in hosts else 0
        while True:
            for number in (*hosts[start:], *hosts[:start]) if len(hosts) > 2 else (self._world.hub,):
                host, port = self._about[number]["hub"]
                is_own = number == self._place.number
                yield (number, "127.0.0.1", self._hub.port) if is_own and number else (number, host, port)

    def _connect(self, number: int, host: str, port: int) -> None:
        connected = connect_to_host(host, port, min(2.0, self._silence))
        if connected is not None:
            with self._changed:
                self._link, self._at = HostLink(connected, self._receive, self._silence), number
                if number != self._place.number:
                    self._own_address = self._link.address
            self._link.start()

    def _meet(self, deadline: float) -> bool:
        """Join at the connected hub, and block; return True with the next world, False to try another hub.

        One is left where it is gone, or, unless the last world has met there, where too few others come.
        Raises RankError where another host ends the run.
        """
        before, until = self.generation, time.monotonic() + 4 * self._silence
        stays = self._world is None or self._at == self._world.hub
        self._join()
        with self._changed:
            while self._link is not None and self.generation == before and self._end_message is None:
                now = time.monotonic()
                if not self._is_spare and (now > deadline or (now > until and not stays)):
                    break
                self._changed.wait(_PAUSE)
            if self._end_message is not None:
                self._raise_end(self._end_message)
            link = self._link
            if self.generation > before or stays or link is None:
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
        addresses = [link.address]
        with suppress(OSError):  # that at which Gloo listens by default
            addresses.append(socket.gethostbyname(socket.gethostname()))
        link.about = {}
        link.send(
            {
                "kind": "join",
                "job": self._run.job,
                "name": self.name,
                "host": self._place.number,
                "token": self._token,
                "ready": self.ready,
                "last": None if self._world is None else asdict(self._world),
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
            elif kind == "world" and message["generation"] > self.generation:
                self._begin(message)
            elif kind == "restart" and message["generation"] == self.generation:
                self._reason = self._reason or message["why"]
            elif kind == "waits":
                self._awaited, self._is_spare = message["why"], message["is_spare"]
            elif kind == "failed":
                if self._failure is None or message["last_good_step"] is not None:
                    self._failure = message
            elif kind == "waiting":
                self._waiting = {int(host): (one[0], one[1]) for host, one in message["hosts"].items()}
            elif kind in ("end", "finished"):
                self._end_message = message
            if kind in ("gone", "refused", "restart", "end", "finished"):
                os.eventfd_write(self._news, 1)
            self._changed.notify_all()
        if kind == "refused":
            link.close()

    def _begin(self, message: Message) -> None:
        """Set the current world to that of a message, and reset what was known of the one before."""
        self._world, self.name, self._reason = world_of(message), str(message["name"]), ""
        self._waiting = {}
        self._about = {int(host): about for host, about in message["about"].items()}

    def ranks(self, ready: int) -> tuple[range, int]:
        """Return the ranks of this host in the current world, and how many there are on all hosts."""
        return self.world.ranks_of(self._place.number), self.world.size

    def report(self, failure: RankFailure, last_good_step: int | None, ranks: Sequence[int] = ()) -> None:
        """Tell the other hosts which rank has failed here, and how."""
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
        """Return which rank has failed on another host, and how, and the last step before wrong bits, if any.

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
        """Tell the other hosts that the run ends, and why."""
        self._send({"kind": "end", "why": why})
        with self._changed:  # until the hub has told all: it may end with this process
            self._changed.wait_for(lambda: self._end_message is not None or self._link is None, self._silence)

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
        with self._changed:
            link, self._link, is_shut, self._is_shut = self._link, None, self._is_shut, True
        if link is not None:
            link.close()
        self._hub.close()
        if not is_shut:
            os.close(self._news)
        return True


def _plain(result: object, rank: int) -> str:
    try:
        return json_values.encode(result)
    except NotPlainError as error:
        raise PlaitError(
            f"rank {rank}'s result is a {error}, which elastic ranks do not send to other hosts: return "
            "numbers, text, tensors and containers of them."
        ) from None
