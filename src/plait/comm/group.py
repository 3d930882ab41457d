"""A group: the ranks that communicate with each other along one axis, seen from one of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.comm.host.host import Host
from plait.comm.host.lines import Lines
from plait.comm.host.scratch import Scratch
from plait.comm.last_words import LastWords
from plait.comm.traffic import Traffic

Neighbours = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The tensors of the ranks before and after this one."""


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks along one axis of the mesh. A `Mesh` makes it and owns its traffic.

    Operations take it explicitly and count ranks by their index in `ranks`. Without a `process_group` the
    rank is alone: no backend is needed, operations return what they were given and count nothing.
    """

    name: str
    """The axis it runs along, as counted in traffic: `"pp"`, `"dp"`, `"world"`, ..."""
    ranks: tuple[int, ...]
    """Global ranks, in order of their index."""
    index: int
    """This rank's place in `ranks`."""
    process_group: dist.ProcessGroup | None
    traffic: Traffic
    timeout: float
    """Seconds after which a wait fails."""
    host: Host | None = None
    """The ranks of the mesh on this host, where ranks of one host can reach each other besides."""
    shared: MutableMapping[Tensor, Neighbours] = field(default_factory=WeakTensorKeyDictionary)
    """For those of this rank's tensors that others reach: theirs. See `plait.comm.shared`."""
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

    @cached_property
    def uses_gloo(self) -> bool:
        """Whether tensors on the CPU can travel, over Gloo."""
        # A public function that the package does not re-export; it gives e.g. "cpu:gloo,cuda:nccl".
        config = dist.distributed_c10d.get_backend_config(self.process_group)
        return "cpu:gloo" in config

    @cached_property
    def on_one_host(self) -> bool:
        """Whether all its ranks can reach each other on one host, so that they have `lines`."""
        return self.process_group is not None and self.host is not None and self.host.has(self.ranks)

    @cached_property
    def lines(self) -> Lines:
        """The lines to its other ranks. All ranks ask for them at the same operation; none waits."""
        assert self.host is not None
        assert self.process_group is not None
        return self.host.lines(self.ranks, self.index, self.process_group.group_name, self.timeout)

    @cached_property
    def scratch(self) -> Scratch:
        """Where its ranks show each other tensors. As for `lines`."""
        return Scratch(self.lines)

    def fail(self, cause: Exception) -> None:
        """An operation failed: let later ones on the lines fail too, here and on the other ranks, at once."""
        if "lines" in self.__dict__:
            self.lines.fail(cause)

    def __deepcopy__(self, memo: object) -> Group:
        """A module that is copied goes on communicating with the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Group({self.name}: ranks {', '.join(map(str, self.ranks))}; index {self.index})"
