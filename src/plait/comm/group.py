"""A group: the ranks that communicate with each other along one axis, seen from one of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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
    shared: MutableMapping[Tensor, Neighbours] = field(default_factory=WeakTensorKeyDictionary)
    """For those of this rank's tensors that others reach: theirs. See `plait.comm.shared`."""

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

    def __deepcopy__(self, memo: object) -> Group:
        """A module that is copied goes on communicating with the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Group({self.name}: ranks {', '.join(map(str, self.ranks))}; index {self.index})"
