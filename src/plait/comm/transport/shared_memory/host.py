"""What a rank knows about the ranks of its mesh: which of them share its host, and how they are called."""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Mapping, Sequence

from plait.comm.transport.shared_memory.door import Door
from plait.comm.transport.shared_memory.lines import Lines

Card = Mapping[str, str]
"""What a rank says about itself when the mesh is made: its home, and the name of its door there."""


class Host:
    """The ranks of one mesh on one host, as one of them sees them. Belongs to the mesh and its groups."""

    def __init__(self, door: Door, cards: Sequence[Card]) -> None:
        """Takes this rank's door, and the cards of all ranks of the mesh in order."""
        self._door = door
        self._cards = tuple(cards)
        self._lines: weakref.WeakSet[Lines] = weakref.WeakSet()

    def has(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks can all reach each other here. The same answer on each of them."""
        homes = [{**self._cards[rank], "door": ""} for rank in ranks]
        return all(home == homes[0] for home in homes) and all("door" in self._cards[rank] for rank in ranks)

    def lines(self, ranks: Sequence[int], index: int, label: str, timeout: float) -> Lines:
        """Lines between ranks that are here; `Lines` says what the arguments are. Closed with the mesh."""
        lines = Lines(self._door, [self._cards[rank]["door"] for rank in ranks], index, label, timeout)
        self._lines.add(lines)
        return lines

    def close(self) -> None:
        """Hang up all lines, and let nobody call any more."""
        for lines in tuple(self._lines):
            lines.close()
        self._door.close()


def home() -> dict[str, str]:
    """Where a door is reached by its name: one boot of a host, one network and user namespace, one user."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = {space: os.readlink(f"/proc/self/ns/{space}") for space in ("net", "user")}
        return {"host": socket.gethostname(), "boot": boot, "owner": str(os.getuid()), **spaces}
    except OSError:
        return {"host": secrets.token_hex(8)}  # unlike any other
