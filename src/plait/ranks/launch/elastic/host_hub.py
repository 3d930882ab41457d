"""`HostHub`: server that connects the supervisors of a run, and decides which hosts a world has.

    where      anybody asks where the hosts have met last; at: the answer
    join       a host has nothing that runs, and so many processes that can be ranks
    restart    to the hosts that run: another one has joined, or is gone; they stop, and join, too
    waits      to those that have joined: too few of the last world are there
    propose    to those that have joined: the hosts and ranks of the next generation; accept: the answer
    world      to the same, when all have accepted: the next generation begins
    ready      a host that runs could have so many ranks; larger: how many all hosts could have
    failed     which rank of a host has failed, for the others
    done       the results of a host's ranks; finished: those of all
    end        the run ends, and why
    told       a host has received finished or end; all told: every host has
    replaced   another process is the host of this number now
    ended      from a host whose hub was lost before all were told: what it has heard, to each of the others

Every supervisor has one. They meet at that of the first host, and where it is gone, at the next one's.

A host that has accepted a world counts as one of its hosts from then on, whether it learns that it has begun
or not: so no majority of the world before, with that host, begins another one.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plait.errors import listed, terminal_text
from plait.ranks.launch.elastic.host_link import HostLink, Message
from plait.ranks.launch.elastic.host_quorum import (
    HostWorld,
    KnownWorlds,
    missing_for_majority,
    sizes_of_hosts,
)
from plait.ranks.launch.elastic.meeting_address_search import HubPlace, answer_where
from plait.ranks.run_store import listen

_PAUSE = 0.1
"""Seconds until the next try to accept a connection."""


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
    grows_later: bool = False
    """Whether hosts that come, and new processes, wait until the ranks leave their world after a step."""


@dataclass
class _ConnectedHost:
    """A host whose supervisor is connected."""

    link: HostLink
    number: int
    token: str
    ready: int | None = None
    """How many processes it has to offer; None while it runs."""
    most: int = 0
    """How many it could offer after a wait for new ones."""
    could: int | None = None
    """How many processes it could offer while it runs; None: as many as it has ranks."""
    known: KnownWorlds = field(default_factory=KnownWorlds)
    about: Message = field(default_factory=dict)
    """Its addresses, for the others."""
    waits: tuple[bool, bool] = (False, False)
    """Whether some of its ranks wait in vain, and whether all do."""


class HostHub:
    """Server to which all supervisors of a run connect, and which decides the hosts of each world."""

    def __init__(
        self,
        number: int,
        listener: socket.socket,
        run: HostRun,
        silence: float,
        hear_end: Callable[[str, Message], None],
    ) -> None:
        """`number`: of this host. `silence`: seconds after which another one counts as gone.

        `hear_end`: called in a thread with the name of a run, and the message that has ended it, where a host
        passes it on after its own hub was lost.
        """
        self._number, self._listener, self._run, self._silence = number, listener, run, silence
        self._hear_end = hear_end
        self.port = int(listener.getsockname()[1])
        self._lock = threading.RLock()
        self._peers: dict[int, _ConnectedHost] = {}
        self._links: set[HostLink] = set()
        self._replaced: set[str] = set()
        """The tokens of supervisors whose host was started again."""
        self._world: HostWorld | None = None
        self._proposed: HostWorld | None = None
        """The next world, until all its hosts have accepted it."""
        self._accepted: set[int] = set()
        self._known = KnownWorlds()
        """The worlds that are known where it was proposed or begun last, here."""
        self._larger = 0
        """The number of ranks of a larger world that is possible, as the hosts were told; 0: none."""
        self.met: HubPlace | None = None
        """Where this host has met others last."""
        self._name = ""
        self._done: dict[int, list[str]] = {}
        self._end_message: Message | None = None
        """What ends the run: its results, or why it has none."""
        self._untold: set[int] = set()
        """The hosts that have not said yet that they have received it."""
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
        deadline = time.monotonic() + self._silence  # of all together: some hosts may be gone
        for link in links:
            link.finish()
        for link in links:
            link.close(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:  # it is closed
                    return
                time.sleep(_PAUSE)  # this process has too many files open, for a while
                continue
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
                return
            try:
                self._handle(link, peer, message)
            except (KeyError, TypeError, ValueError, IndexError) as error:  # anybody can connect
                what = f"a message of kind {message.get('kind')} at the supervisor's port"
                print(terminal_text(f"plait: {what} is ignored ({error!r})."), file=sys.stderr, flush=True)
                if peer is None:
                    raise ConnectionError from None  # which ends the connection

    def _handle(self, link: HostLink, peer: _ConnectedHost | None, message: Message) -> None:
        if message["kind"] == "where":
            link.send(answer_where(self.met if message["job"] == self._run.job else None))
        elif message["kind"] == "join":
            self._join(link, peer, message)
        elif message["kind"] == "told":
            self._note_told(None if peer is None else peer.number)
        elif message["kind"] == "ended" and message["job"] == self._run.job:
            self._hear_end(message["name"], message["end"])
            link.send({"kind": "told"})
        elif peer is not None:
            self._handle_peer(peer, message)

    def _handle_peer(self, peer: _ConnectedHost, message: Message) -> None:
        """Handle a message of a host that has joined: beat, acceptance, failure, end or results."""
        kind, world = message["kind"], self._world
        if kind == "beat":
            waits: tuple[bool, bool] = tuple(message.get("waits", peer.waits))
            if waits != peer.waits:
                peer.waits = waits
                every = {one.number: one.waits for one in self._peers.values()}
                self._send_all({"kind": "waiting", "hosts": every})
        elif kind == "accept":
            self._accept_world(peer, message["generation"])
        elif kind == "ready" and world is not None and message["generation"] == world.generation:
            peer.could = int(message["processes"])
            self._tell_larger()
        elif kind == "failed":
            self._send_all({**message, "host": peer.number}, but=peer)
            self._restart(f"a rank of host {peer.number} has failed", but=peer)
        elif kind == "end" and self._end_message is None:
            self._end({"kind": "end", "why": f"host {peer.number} ends the run: {message['why']}"})
        elif kind == "done" and world is not None and message["generation"] == world.generation:
            self._done[peer.number] = message["results"]
            self._finish(world)

    def _finish(self, world: HostWorld) -> None:
        if self._end_message is None and self._done.keys() >= set(world.hosts):
            results = [one for host in world.hosts for one in self._done[host]]
            self._end({"kind": "finished", "results": results})

    def _end(self, message: Message) -> None:
        """Tell all hosts that the run ends; each is to answer that it has been told."""
        self._end_message, self._untold = message, {*self._peers}
        self._send_all(message)

    def _note_told(self, number: int | None) -> None:
        """Note that a host knows of the end, or is gone; tell all hosts once each does."""
        self._untold -= {number}
        if self._end_message is not None and not self._untold:
            for link in self._links:
                link.send({"kind": "all told"})

    def _join(self, link: HostLink, peer: _ConnectedHost | None, message: Message) -> None:
        """Add a host that has stopped its ranks, or is new, to the next world; `peer`: its entry, if any."""
        if message["job"] != self._run.job or message["token"] in self._replaced:
            taken = message["token"] in self._replaced
            why = f"another process is host {message['host']}, too" if taken else "it is of another run"
            link.send({"kind": "replaced" if taken else "refused", "why": why})
            return
        if self._end_message is not None:
            link.send(self._end_message)
            return
        number = int(message["host"])
        other = self._peers.get(number)
        if other is not None and other is not peer:
            if other.token != message["token"]:
                self._replaced.add(other.token)
                other.link.send({"kind": "replaced", "why": f"another process is host {number}, too"})
            self._remove(other, f"host {number} was started again", begins=False)
        peer = _ConnectedHost(link, number, message["token"]) if peer is None else peer
        self._peers[number] = peer
        peer.ready, peer.most = int(message["ready"]), int(message["most"])
        peer.about, peer.waits, peer.could = message["about"], (False, False), None
        peer.known = known_of(message["known"])
        self._name = self._name or message["name"]
        if self._proposed is not None and number in self._proposed.hosts:  # it has left, and comes back
            self._proposed = None
        self._take_in(peer)
        self._begin_if_complete()

    def _take_in(self, peer: _ConnectedHost) -> None:
        """Make the hosts that run stop for one that has joined, now or between two steps, if it is needed."""
        if self._is_spare(peer.number):
            self._tell_larger()
        elif self._proposed is None:  # else once that world has begun
            stopped = self._world is not None and peer.number in self._world.hosts
            left = "left for a larger world" if self._larger else "stopped"
            self._restart(f"host {peer.number} has {left if stopped else 'come'}")

    def _is_spare(self, number: int) -> bool:
        """Return whether a host is not in the current world, which goes on without it for now."""
        world = self._world
        if world is None or number in world.hosts:
            return False
        runs = any(one.ready is None for one in self._peers.values())
        return world.size >= self._run.wanted or (self._run.grows_later and runs)

    def _remove(self, peer: _ConnectedHost, why: str, *, begins: bool = True) -> None:
        """Remove a host that is gone, and make the others stop for a world without it.

        `begins`: that world may begin; False where the host joins by another connection.
        """
        if self._peers.get(peer.number) is peer:
            del self._peers[peer.number]
            self._note_told(peer.number)
        if self._proposed is not None and peer.number in self._proposed.hosts:
            self._proposed = None  # those that have accepted it count by it all the same
        elif self._world is not None and peer.number in self._world.hosts and peer.number not in self._done:
            self._restart(why)
        else:
            self._tell_larger()
        if begins:
            self._begin_if_complete()

    def _tell_larger(self) -> None:
        """Tell the hosts that run, if it has changed, how many ranks a larger world could have; 0: none."""
        world = self._world
        if world is None or not self._run.grows_later or self._proposed is not None:
            return
        could = {
            number: (one.could if one.could is not None else world.sizes[world.hosts.index(number)])
            if one.ready is None
            else one.ready
            for number, one in sorted(self._peers.items())
        }
        sizes, _ = self._sizes(could)
        size = sum(sizes) if sum(sizes) > world.size else 0
        if size != self._larger:
            self._larger = size
            message = {"kind": "larger", "generation": world.generation, "ranks": size}
            for one in self._peers.values():
                if one.ready is None:
                    one.link.send(message)

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
        if self._end_message is not None or not joined or self._proposed is not None:
            return
        known = {number: one.known for number, one in joined.items()}
        if self._number in known:
            known[self._number] = known[self._number].merged(self._known)
        awaited = self._awaited(known)
        if not awaited:
            self._propose(joined, KnownWorlds().merged(*known.values()))
            return
        names = listed([f"host {number}" for number in awaited])
        for one in joined.values():
            one.link.send({"kind": "waits", "why": names, "is_spare": self._is_spare(one.number)})

    def _awaited(self, known: Mapping[int, KnownWorlds]) -> list[int]:
        """Return the hosts that have still to join the next world; `known`: the worlds of the joined ones."""
        worlds = KnownWorlds().merged(*known.values()).worlds
        if worlds and self._number not in known:
            return [self._number]
        if running := [number for number in self._peers if number not in known]:
            return running  # they were told to stop
        absent = [host for one in worlds for host in one.hosts if host not in known and host != one.hub]
        if self._world is None and absent and self._may_still_come():
            return absent
        return missing_for_majority(known, range(self._run.hosts))

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

    def _sizes(self, ready: Mapping[int, int]) -> tuple[tuple[int, ...], str]:
        """Return how many ranks each host has, given how many processes; or () and why there are none."""
        try:
            sizes = sizes_of_hosts(ready, self._run.wanted, self._run.ranks_of)
        except Exception as error:  # of the user's function: the supervisors wait for an answer
            return (), f"Elastic's ranks_of raised {error!r}"
        return sizes, "" if sizes else f"{sum(ready.values())} processes are left, too few to go on with"

    def _propose(self, joined: Mapping[int, _ConnectedHost], known: KnownWorlds) -> None:
        """Divide the ranks of the next world among the joined hosts, and ask these to accept it.

        `known`: what they know together, which each learns: one may have been started again.
        """
        sizes, why = self._sizes({number: one.ready or 0 for number, one in joined.items()})
        if not sizes and self._run.grows_later:  # nothing else is to be done until there are processes
            sizes, why = self._sizes({number: one.most for number, one in joined.items()})
        if not sizes:
            self._end({"kind": "end", "why": why})
            return
        host = joined[self._number].about["hub"][0]
        if self._store is None:
            store = listen(host, 0)
            assert isinstance(store, TCPStore), "the system chooses a free port"
            self._store = store
        self._name = self._name or secrets.token_hex(8)
        address = f"tcp://{host}:{self._store.port}"
        self._proposed = HostWorld(known.generation + 1, tuple(joined), sizes, self._number, address)
        self._accepted.clear()
        self._known = known.merged(KnownWorlds(accepted=(self._proposed,)))
        for one in joined.values():
            one.link.send({"kind": "propose", "known": asdict(self._known)})

    def _accept_world(self, peer: _ConnectedHost, generation: int) -> None:
        """Note that a host has accepted the world proposed last; begin that if all its hosts have."""
        if generation != self._known.generation:
            return
        peer.known = self._known
        self._accepted.add(peer.number)
        if self._proposed is None:  # one of its hosts is gone
            self._begin_if_complete()
        elif self._accepted >= set(self._proposed.hosts):
            self._begin(self._proposed)

    def _begin(self, world: HostWorld) -> None:
        """Begin a world that all its hosts have accepted; then take in the hosts that have come meanwhile."""
        self._world, self._proposed, self._larger = world, None, 0
        self._known = KnownWorlds(world)
        self._done.clear()
        members = [self._peers[number] for number in world.hosts]
        message = {"kind": "world", "name": self._name, **asdict(world)}
        message["about"] = {one.number: one.about for one in members}
        for one in members:
            one.ready, one.could, one.known = None, None, self._known
            one.link.send(message)
        others = [one for one in self._peers.values() if one.ready is not None]
        for one in others:
            self._take_in(one)
        if others:
            self._begin_if_complete()

    def _send_all(self, message: Message, but: _ConnectedHost | None = None) -> None:
        for one in self._peers.values():
            if one is not but:
                one.link.send(message)


def known_of(message: Mapping[str, Any]) -> KnownWorlds:
    """Return the `KnownWorlds` that is in a message as JSON data."""
    begun = message["begun"]
    return KnownWorlds(None if begun is None else world_of(begun), tuple(map(world_of, message["accepted"])))


def world_of(message: Mapping[str, Any]) -> HostWorld:
    """Return the `HostWorld` that is in a message as JSON data."""
    return HostWorld(
        int(message["generation"]),
        tuple(message["hosts"]),
        tuple(message["sizes"]),
        int(message["hub"]),
        str(message["store"]),
    )
