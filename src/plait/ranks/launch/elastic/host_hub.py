"""`HostHub`: where the supervisors of a run's hosts meet: it decides which hosts are a generation's world.

    join       a host has nothing that runs, and so many processes that can be ranks
    restart    to the hosts that run: another one has joined, or is gone; they stop, and join, too
    waits      to those that have joined: too few of the last world are there
    world      to those that have joined: the hosts and ranks of the next generation
    failed     which rank of a host has failed, for the others
    done       the results of a host's ranks; finished: those of all
    end        the run ends, and why

Every supervisor has one. They meet at that of the first host, and where it is gone, at the next one's.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plait.errors import listed
from plait.ranks.launch.elastic.host_agreement import HostWorld, missing_for_majority, sizes_of_hosts
from plait.ranks.launch.elastic.host_link import HostLink, Message
from plait.ranks.run_store import listen


@dataclass(frozen=True)
class HostRun:
    """What the supervisors of one run have in common."""

    job: str
    """The launcher's name of the run."""
    hosts: int
    """How many it started."""
    wanted: int
    """The most ranks."""
    ranks_of: Callable[[int], int] | None
    """As in `Elastic`."""


@dataclass
class _Guest:
    """A host whose supervisor is connected."""

    link: HostLink
    number: int
    token: str
    ready: int | None = None
    """How many processes it has to offer; None while it runs."""
    last: HostWorld | None = None
    """The newest world that it was in."""
    about: Message = field(default_factory=dict)
    """Its addresses, for the others."""
    waits: tuple[bool, bool] = (False, False)
    """Whether some of its ranks wait in vain, and whether all do."""


class HostHub:
    """Listens for the supervisors of a run, and tells them which hosts are the next world."""

    def __init__(self, number: int, listener: socket.socket, run: HostRun, silence: float) -> None:
        """`number`: of this host. `silence`: seconds after which another one counts as gone."""
        self._number, self._listener, self._run, self._silence = number, listener, run, silence
        self.port = int(listener.getsockname()[1])
        self._lock = threading.RLock()
        self._guests: dict[int, _Guest] = {}
        self._links: set[HostLink] = set()
        self._replaced: set[str] = set()
        """The tokens of supervisors whose host was started again."""
        self._world: HostWorld | None = None
        self._name = ""
        self._done: dict[int, list[str]] = {}
        self._last_word: Message | None = None
        """What ends the run: its results, or why it has none."""
        self._store: TCPStore | None = None
        self._patience: threading.Timer | None = None
        """Runs out when no more hosts are expected here after the first hub was lost."""
        threading.Thread(target=self._accept, name="plait-hosts", daemon=True).start()

    def close(self) -> None:
        """Send what is still to be sent, and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread that accepts
        self._listener.close()
        with self._lock:
            links = [*self._links]
        for link in links:
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            link = HostLink(connected, self._receive, self._silence)
            with self._lock:
                self._links.add(link)
            link.start()

    def _receive(self, link: HostLink, message: Message | None) -> None:
        with self._lock:
            guest = next((one for one in self._guests.values() if one.link is link), None)
            if message is None:
                self._links.discard(link)
                if guest is not None:
                    self._lose(guest, f"host {guest.number} is gone")
            elif message["kind"] == "join":
                self._join(link, guest, message)
            elif guest is not None:
                self._hear(guest, message)

    def _hear(self, guest: _Guest, message: Message) -> None:
        """Take a message of a host that runs."""
        kind, world = message["kind"], self._world
        if kind == "beat":
            waits: tuple[bool, bool] = tuple(message.get("waits", guest.waits))
            if waits != guest.waits:
                guest.waits = waits
                every = {one.number: one.waits for one in self._guests.values()}
                self._send_all({"kind": "waiting", "hosts": every})
        elif kind == "failed":
            self._send_all({**message, "host": guest.number}, but=guest)
            self._restart(f"a rank of host {guest.number} has failed", but=guest)
        elif kind == "end":
            self._last_word = {"kind": "end", "why": f"host {guest.number} ends the run: {message['why']}"}
            self._send_all(self._last_word)
        elif kind == "done" and world is not None and message["generation"] == world.generation:
            self._done[guest.number] = message["results"]
            self._finish(world)

    def _finish(self, world: HostWorld) -> None:
        if self._last_word is None and self._done.keys() >= set(world.hosts):
            results = [one for host in world.hosts for one in self._done[host]]
            self._last_word = {"kind": "finished", "results": results}
            self._send_all(self._last_word)

    def _join(self, link: HostLink, guest: _Guest | None, message: Message) -> None:
        """Take a host that has stopped, or is new; `guest`: what is known of it, if anything."""
        if message["job"] != self._run.job or message["token"] in self._replaced:
            taken = message["token"] in self._replaced
            why = f"another process is host {message['host']}, too" if taken else "it is of another run"
            link.send({"kind": "end" if taken else "refused", "why": why})
            return
        if self._last_word is not None:
            link.send(self._last_word)
            return
        number = int(message["host"])
        other = self._guests.get(number)
        if other is not None and other is not guest:
            if other.token != message["token"]:
                self._replaced.add(other.token)
                other.link.send({"kind": "end", "why": f"another process is host {number}, too"})
            self._lose(other, f"host {number} was started again")
        guest = _Guest(link, number, message["token"]) if guest is None else guest
        self._guests[number] = guest
        guest.ready, guest.about, guest.waits = int(message["ready"]), message["about"], (False, False)
        guest.last = None if message["last"] is None else world_of(message["last"])
        self._name = self._name or message["name"]
        if not self._is_spare(number):
            stopped = self._world is not None and number in self._world.hosts
            self._restart(f"host {number} has {'stopped' if stopped else 'come'}")
        self._consider()

    def _is_spare(self, number: int) -> bool:
        """Return whether a host is not in the current world, which has as many ranks as are wanted."""
        world = self._world
        return world is not None and number not in world.hosts and world.size >= self._run.wanted

    def _lose(self, guest: _Guest, why: str) -> None:
        """Go on without a host."""
        self._guests.pop(guest.number, None)
        if self._world is not None and guest.number in self._world.hosts and guest.number not in self._done:
            self._restart(why)
            self._consider()

    def _restart(self, why: str, but: _Guest | None = None) -> None:
        """Tell the hosts that run to stop, and to join."""
        if self._world is not None:
            message = {"kind": "restart", "generation": self._world.generation, "why": why}
            for one in self._guests.values():
                if one.ready is None and one is not but:
                    one.link.send(message)

    def _consider(self) -> None:
        """Make the next world, if all hosts have joined that it has to wait for, and they are enough."""
        joined = {number: one for number, one in sorted(self._guests.items()) if one.ready is not None}
        if self._last_word is not None or not joined:
            return
        lasts = [one.last for one in joined.values() if one.last is not None]
        lasts += [] if self._world is None else [self._world]
        awaited = self._awaited(lasts, joined)
        if not awaited:
            self._begin(joined, max((last.generation for last in lasts), default=0) + 1)
            return
        names = listed([f"host {number}" for number in awaited])
        for one in joined.values():
            one.link.send({"kind": "waits", "why": names, "is_spare": self._is_spare(one.number)})

    def _awaited(self, lasts: Sequence[HostWorld], joined: Collection[int]) -> list[int]:
        """Return the hosts that those which have joined wait for; `lasts`: the worlds that they were in."""
        if not lasts:
            return [number for number in range(self._run.hosts) if number not in joined]
        if self._number not in joined:
            return [self._number]
        if running := [number for number in self._guests if number not in joined]:
            return running  # they were told to stop
        absent = [host for last in lasts for host in last.hosts if host not in joined and host != last.hub]
        if self._world is None and absent and self._is_patient():
            return absent
        return missing_for_majority(lasts, joined, self._number)

    def _is_patient(self) -> bool:
        """Return whether hosts may still come that have lost their hub: some notice it by silence only."""
        if self._patience is None:
            self._patience = threading.Timer(1.5 * self._silence, self._lose_patience)
            self._patience.daemon = True
            self._patience.start()
        return not self._patience.finished.is_set()

    def _lose_patience(self) -> None:
        assert self._patience is not None, "it calls this"
        with self._lock:
            self._patience.finished.set()
            self._consider()

    def _begin(self, joined: Mapping[int, _Guest], generation: int) -> None:
        """Make a world of the hosts that have joined, and tell them."""
        ready = {number: one.ready or 0 for number, one in joined.items()}
        why = f"{sum(ready.values())} processes are left, too few to go on with"
        sizes: tuple[int, ...] = ()
        try:
            sizes = sizes_of_hosts(ready, self._run.wanted, self._run.ranks_of)
        except Exception as error:  # of the user's function: the supervisors wait for an answer
            why = f"Elastic's ranks_of raised {error!r}"
        if not sizes:
            self._last_word = {"kind": "end", "why": why}
            self._send_all(self._last_word)
            return
        host = joined[self._number].about["hub"][0]
        if self._store is None:
            store = listen(host, 0)
            assert isinstance(store, TCPStore), "the system chooses a free port"
            self._store = store
        self._name = self._name or secrets.token_hex(8)
        self._world = HostWorld(
            generation, tuple(joined), sizes, self._number, f"tcp://{host}:{self._store.port}"
        )
        self._done.clear()
        about = {number: one.about for number, one in joined.items()}
        for one in joined.values():
            one.ready, one.last = None, self._world
        self._send_all({"kind": "world", "name": self._name, "about": about, **asdict(self._world)})

    def _send_all(self, message: Message, but: _Guest | None = None) -> None:
        for one in self._guests.values():
            if one is not but:
                one.link.send(message)


def world_of(message: Mapping[str, Any]) -> HostWorld:
    """Return the world in a message."""
    return HostWorld(
        int(message["generation"]),
        tuple(message["hosts"]),
        tuple(message["sizes"]),
        int(message["hub"]),
        str(message["store"]),
    )
