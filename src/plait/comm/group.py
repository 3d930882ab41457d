"""A group: the ranks that communicate with each other along one axis, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.comm.last_words import LastWords
from plait.comm.traffic import Traffic
from plait.comm.transport.interface import Transport


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks along one axis of the mesh. A `Mesh` makes it and owns its traffic.

    Operations take it explicitly and count ranks by their index in `ranks`. Without a `transport` the
    rank is alone: no backend is needed, operations return what they were given and count nothing.
    """

    name: str
    """The axis it runs along, as counted in traffic: `"pp"`, `"dp"`, `"world"`, ..."""
    ranks: tuple[int, ...]
    """Global ranks, in order of their index."""
    index: int
    """This rank's place in `ranks`."""
    transport: Transport | None
    traffic: Traffic
    timeout: float
    """Seconds after which a wait fails."""
    words: LastWords | None = None
    """Where its ranks leave word when they fail, if they can."""
    guarded: bool = False
    """Whether its ranks agree on every collective first, and on what enters a region: see `Mesh`."""

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's global number."""
        return self.ranks[self.index]

    @property
    def on_one_host(self) -> bool:
        """Whether all its ranks are known to be on one host."""
        return self.transport is None or self.transport.on_one_host

    def device_for_text(self, device: torch.device) -> torch.device:
        """The device on which text and small numbers travel: the CPU where its tensors can, else `device`."""
        on_cpu = self.transport is None or self.transport.carries_cpu_tensors
        return torch.device("cpu") if on_cpu else device

    def abort(self, cause: Exception) -> None:
        """Let operations that are pending fail soon, here and on the other ranks, for one has failed."""
        if self.transport is not None:
            self.transport.abort(cause)

    def __deepcopy__(self, memo: object) -> Group:
        """A module that is copied goes on communicating with the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Group({self.name}: ranks {', '.join(map(str, self.ranks))}; index {self.index})"
