"""Which hosts go on after a failure, and with how many ranks each: decisions, without communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostWorld:
    """The hosts and ranks of one generation, as all its supervisors know them."""

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
        """The number of ranks."""
        return sum(self.sizes)

    def ranks_of(self, host: int) -> range:
        """Return the ranks on a host."""
        place = self.hosts.index(host)
        first = sum(self.sizes[:place])
        return range(first, first + self.sizes[place])


def missing_for_majority(lasts: Collection[HostWorld], present: Collection[int], hub: int) -> list[int]:
    """Return the hosts that the `present` ones must wait for; empty where these are a majority.

    `lasts`: the newest worlds that they were in. Of each a majority has to be there; or half of it, if they
    meet where that world has met, `hub`: two halves that do not reach each other would both go on.
    """
    newest = max((last.generation for last in lasts), default=0)
    for last in lasts:
        there = len(set(last.hosts) & set(present))
        enough = 2 * there > len(last.hosts) or (2 * there == len(last.hosts) and hub == last.hub)
        if last.generation == newest and not enough:
            return [host for host in last.hosts if host not in present]
    return []


def sizes_of_hosts(
    ready: Mapping[int, int], wanted: int, ranks_of: Callable[[int], int] | None
) -> tuple[int, ...]:
    """Return how many ranks each host has, in the order of their numbers; () where there are too few.

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
