"""Which hosts go on after a failure, and with how many ranks each: decisions, without communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class HostWorld:
    """The hosts and ranks of one generation (from one restart to the next), as all supervisors know them."""

    generation: int
    """Counts the worlds of a run, from 1."""
    hosts: tuple[int, ...]
    """Their numbers, in the order of their ranks."""
    sizes: tuple[int, ...]
    """How many ranks each has; 0: its processes are spares."""
    hub: int
    """The number of the host at whose supervisor they met."""
    store: str
    """Where the ranks meet: `tcp://HOST:PORT`."""

    @property
    def size(self) -> int:
        """The number of ranks on all hosts."""
        return sum(self.sizes)

    def ranks_of(self, host: int) -> range:
        """Return the global ranks on the host with number `host`."""
        place = self.hosts.index(host)
        first = sum(self.sizes[:place])
        return range(first, first + self.sizes[place])


@dataclass(frozen=True)
class KnownWorlds:
    """The worlds (hosts and ranks of a generation) that a host knows; none where it has just started."""

    begun: HostWorld | None = None
    """The newest that all its hosts have accepted, so that their ranks may have started."""
    accepted: tuple[HostWorld, ...] = ()
    """Those that hosts have accepted since: they may have begun, or were proposed in vain."""

    @property
    def worlds(self) -> tuple[HostWorld, ...]:
        """The newest world that has begun, and those accepted since, one of which may have begun."""
        return self.accepted if self.begun is None else (self.begun, *self.accepted)

    @property
    def generation(self) -> int:
        """The number of the newest known world; 0 if none is known."""
        return max(map(_generation, self.worlds), default=0)

    def merged(self, *others: KnownWorlds) -> KnownWorlds:
        """Return the worlds that this host and others know together."""
        every = (self, *others)
        begun = max((one.begun for one in every), key=_generation)
        accepted = {world for one in every for world in one.accepted}
        since = [world for world in accepted if world.generation > _generation(begun)]
        return KnownWorlds(begun, tuple(sorted(since, key=_generation)))


def _generation(world: HostWorld | None) -> int:
    return 0 if world is None else world.generation


def missing_for_majority(present: Mapping[int, KnownWorlds], everyone: Collection[int]) -> list[int]:
    """Return the hosts that the `present` ones must wait for; empty where these may go on.

    `present`: what each of them knows. `everyone`: all hosts of the run. A majority has to be present of each
    world that may be the current one, or a half with the host of its hub. A host that knows no world was
    started again: it may have gone on with others, and forgotten it, so it does not count. Only where all
    hosts are present, nobody else can have gone on.
    """
    worlds = KnownWorlds().merged(*present.values()).worlds
    everyone = {*everyone, *chain.from_iterable(world.hosts for world in worlds)}
    absent = sorted(everyone - set(present))
    for world in worlds:
        count = [host for host in world.hosts if host in present and present[host].generation]
        of_half = 2 * len(count) == len(world.hosts) and world.hub in count
        if 2 * len(count) <= len(world.hosts) and not of_half:
            return [host for host in world.hosts if host not in present] or absent  # [] where all are there
    return [] if worlds else absent


def sizes_of_hosts(
    ready: Mapping[int, int], wanted: int, ranks_of: Callable[[int], int] | None
) -> tuple[int, ...]:
    """Return how many ranks each host gets, in the order of their numbers; () for too few processes.

    `ready`: how many processes each can have. `wanted`: the most ranks. `ranks_of`: as in `Elastic`. Each
    host has a rank where there are enough, since its memory holds snapshots; the first hosts are full.
    """
    most = min(sum(ready.values()), wanted)
    size = most if ranks_of is None or not most else ranks_of(most)
    if not 0 < size <= most:
        return ()
    return _spread(size, [ready[host] for host in sorted(ready)])


def _spread(size: int, room: Sequence[int]) -> tuple[int, ...]:
    """Return how many of `size` ranks each host gets: one each, then the first hosts up to their `room`."""
    sizes, left = [0] * len(room), size
    for turn in (1, size):
        for place, most in enumerate(room):
            more = min(left, turn, most - sizes[place])
            sizes[place] += more
            left -= more
    return tuple(sizes)
