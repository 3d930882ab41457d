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
    """Settings of a run that are equal on all its hosts: its name, how many hosts and ranks."""

    job: str
    """The launcher's name of the run."""
    hosts: int
    """How many it started."""
    wanted: int
    """The most ranks."""
    ranks_of: Callable[[int], int] | None
    """As in `Elastic`."""


@dataclass
class _ConnectedHost:
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
    """Server to which all supervisors of a run connect, and which decides the hosts of each world."""

    def __init__(self, number: int, listener: socket.socket, run: HostRun, silence: float) -> None:
        """`number`: of this host. `silence`: seconds after which another one counts as gone."""
        self._number, self._listener, self._run, self._silence = number, listener, run, silence
        self.port = int(listener.getsockname()[1])
        self._lock = threading.RLock()
        self._peers: dict[int, _ConnectedHost] = {}
        self._links: set[HostLink] = set()
        self._replaced: set[str] = set()
        """The tokens of supervisors whose host was started again."""
        self._world: HostWorld | None = None
        self._name = ""
        self._done: dict[int, list[str]] = {}
        self._end_message: Message | None = None
        """What ends the run: its results, or why it has none."""
        self._store: TCPStore | None = None
        self._wait_timer: threading.Timer | None = None
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
            peer = next((one for one in self._peers.values() if one.link is link), None)
            if message is None:
                self._links.discard(link)
                if peer is not None:
                    self._remove(peer, f"host {peer.number} is gone")
            elif message["kind"] == "join":
                self._join(link, peer, message)
            elif peer is not None:
                self._handle(peer, message)

    def _handle(self, peer: _ConnectedHost, message: Message) -> None:
        """Handle a message of a host whose ranks run: beat, failure, end or results."""
        kind, world = message["kind"], self._world
        if kind == "beat":
            waits: tuple[bool, bool] = tuple(message.get("waits", peer.waits))
            if waits != peer.waits:
                peer.waits = waits
                every = {one.number: one.waits for one in self._peers.values()}
                self._send_all({"kind": "waiting", "hosts": every})
        elif kind == "failed":
            self._send_all({**message, "host": peer.number}, but=peer)
            self._restart(f"a rank of host {peer.number} has failed", but=peer)
        elif kind == "end":
            self._end_message = {"kind": "end", "why": f"host {peer.number} ends the run: {message['why']}"}
            self._send_all(self._end_message)
        elif kind == "done" and world is not None and message["generation"] == world.generation:
            self._done[peer.number] = message["results"]
            self._finish(world)

    def _finish(self, world: HostWorld) -> None:
        if self._end_message is None and self._done.keys() >= set(world.hosts):
            results = [one for host in world.hosts for one in self._done[host]]
            self._end_message = {"kind": "finished", "results": results}
            self._send_all(self._end_message)

    def _join(self, link: HostLink, peer: _ConnectedHost | None, message: Message) -> None:
        """Add a host that has stopped its ranks, or is new, to the next world; `peer`: its entry, if any."""
        if message["job"] != self._run.job or message["token"] in self._replaced:
            taken = message["token"] in self._replaced
            why = f"another process is host {message['host']}, too" if taken else "it is of another run"
            link.send({"kind": "end" if taken else "refused", "why": why})
            return
        if self._end_message is not None:
            link.send(self._end_message)
            return
        number = int(message["host"])
        other = self._peers.get(number)
        if other is not None and other is not peer:
            if other.token != message["token"]:
                self._replaced.add(other.token)
                other.link.send({"kind": "end", "why": f"another process is host {number}, too"})
            self._remove(other, f"host {number} was started again")
        peer = _ConnectedHost(link, number, message["token"]) if peer is None else peer
        self._peers[number] = peer
        peer.ready, peer.about, peer.waits = int(message["ready"]), message["about"], (False, False)
        peer.last = None if message["last"] is None else world_of(message["last"])
        self._name = self._name or message["name"]
        if not self._is_spare(number):
            stopped = self._world is not None and number in self._world.hosts
            self._restart(f"host {number} has {'stopped' if stopped else 'come'}")
        self._begin_if_complete()

    def _is_spare(self, number: int) -> bool:
        """Return whether a host is not in the current world, which has as many ranks as are wanted."""
        world = self._world
        return world is not None and number not in world.hosts and world.size >= self._run.wanted

    def _remove(self, peer: _ConnectedHost, why: str) -> None:
        """Remove a host that is gone, and make the others stop for a world without it."""
        self._peers.pop(peer.number, None)
        if self._world is not None and peer.number in self._world.hosts and peer.number not in self._done:
            self._restart(why)
            self._begin_if_complete()

    def _restart(self, why: str, but: _ConnectedHost | None = None) -> None:
        """Send a message to the hosts whose ranks run: they are to stop these, and join the next world."""
        if self._world is not None:
            message = {"kind": "restart", "generation": self._world.generation, "why": why}
            for one in self._peers.values():
                if one.ready is None and one is not but:
                    one.link.send(message)

    def _begin_if_complete(self) -> None:
        """Begin the next world if all awaited hosts have joined; else tell the joined ones who is missing."""
        joined = {number: one for number, one in sorted(self._peers.items()) if one.ready is not None}
        if self._end_message is not None or not joined:
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
        """Return the hosts that have still to join the next world; `lasts`: the worlds of the joined ones."""
        if not lasts:
            return [number for number in range(self._run.hosts) if number not in joined]
        if self._number not in joined:
            return [self._number]
        if running := [number for number in self._peers if number not in joined]:
            return running  # they were told to stop
        absent = [host for last in lasts for host in last.hosts if host not in joined and host != last.hub]
        if self._world is None and absent and self._may_still_come():
            return absent
        return missing_for_majority(lasts, joined, self._number)

    def _may_still_come(self) -> bool:
        """Return whether other hosts may still connect after their hub was lost, which some notice late."""
        if self._wait_timer is None:
            self._wait_timer = threading.Timer(1.5 * self._silence, self._stop_waiting)
            self._wait_timer.daemon = True
            self._wait_timer.start()
        return not self._wait_timer.finished.is_set()

    def _stop_waiting(self) -> None:
        assert self._wait_timer is not None, "it calls this"
        with self._lock:
            self._wait_timer.finished.set()
            self._begin_if_complete()

    def _begin(self, joined: Mapping[int, _ConnectedHost], generation: int) -> None:
        """Begin a world of the joined hosts: divide the ranks among them, and send it to all."""
        ready = {number: one.ready or 0 for number, one in joined.items()}
        why = f"{sum(ready.values())} processes are left, too few to go on with"
        sizes: tuple[int, ...] = ()
        try:
            sizes = sizes_of_hosts(ready, self._run.wanted, self._run.ranks_of)
        except Exception as error:  # of the user's function: the supervisors wait for an answer
            why = f"Elastic's ranks_of raised {error!r}"
        if not sizes:
            self._end_message = {"kind": "end", "why": why}
            self._send_all(self._end_message)
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

    def _send_all(self, message: Message, but: _ConnectedHost | None = None) -> None:
        for one in self._peers.values():
            if one is not but:
                one.link.send(message)


def world_of(message: Mapping[str, Any]) -> HostWorld:
    """Return the `HostWorld` that a message describes."""
    return HostWorld(
        int(message["generation"]),
        tuple(message["hosts"]),
        tuple(message["sizes"]),
        int(message["hub"]),
        str(message["store"]),
    )
