"""The ranks of a world of `torch.distributed`: one process each, on one host or several."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from plait.comm.last_words import LastWords, of_world
from plait.comm.transport.interface import Transport
from plait.comm.transport.shared_memory.discovery import discover_host
from plait.comm.transport.shared_memory.host import Host
from plait.comm.transport.shared_memory.transport import SharedMemoryTransport
from plait.comm.transport.torch_distributed import TorchTransport, backends_of
from plait.errors import CommunicationError


class Processes:
    """The initialised world of torch. See `Ranks`."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shared_results: dict[Hashable, Any] = {}
        self._failure_log: LastWords | None = None
        self._host: Host | None = None
        self._made: list[dist.ProcessGroup] = []

    @property
    def uses_nccl(self) -> bool:
        """Whether the world has NCCL."""
        return "nccl" in backends_of(None)

    @property
    def failure_log(self) -> LastWords | None:
        """In the store where the ranks met."""
        return self._failure_log

    def world(self) -> Transport | None:
        """Over the process group that is there already."""
        if self.size == 1:
            return None
        assert dist.group.WORLD is not None
        return TorchTransport(dist.group.WORLD, self.rank)

    def discover(self, timeout: float) -> None:
        """Find out which ranks share this rank's host. Blocks until all ranks have called it."""
        assert dist.group.WORLD is not None
        self._failure_log = of_world(self.rank, timeout)
        self._host = discover_host(TorchTransport(dist.group.WORLD, self.rank))

    def connect(self, groups: Sequence[tuple[int, ...]], name: str, timeout: float) -> Transport | None:
        """All ranks make all process groups, those that they are not in as well: torch asks for that."""
        mine: Transport | None = None
        for ranks in groups:
            if len(ranks) == 1:
                continue
            made = self._new_group(ranks, name, timeout)
            if self.rank in ranks:
                self._made.append(made)
                mine = self._transport(made, ranks, timeout)
        return mine

    def _new_group(self, ranks: tuple[int, ...], name: str, timeout: float) -> dist.ProcessGroup:
        """Make a process group, with all ranks of the world. CommunicationError where one does not come."""
        try:
            made: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout), group_desc=name, sort_ranks=False
            )
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
            raise CommunicationError(
                f"rank {self.rank} waits for rank {others} to make the group {name} of the mesh: "
                f"{str(error).splitlines()[0]} (see what that rank is doing, or give the mesh more time)."
            ) from error
        return made

    @cached_property
    def own_process_group(self) -> dist.ProcessGroup:
        """Of this rank alone; no other takes part in making it."""
        made: dist.ProcessGroup | None = dist.group.WORLD
        if self.size > 1:
            made = dist.new_group([self.rank], use_local_synchronization=True, group_desc="alone")
            self._made.append(made)
        assert made is not None
        return made

    def close(self) -> None:
        """Close the channels of this host and destroy the process groups."""
        if self._host is not None:
            self._host.close()
        for process_group in self._made:
            dist.destroy_process_group(process_group)
        self._made.clear()

    def _transport(
        self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], timeout: float
    ) -> TorchTransport:
        index = ranks.index(self.rank)
        if self._host is None or not self._host.has(ranks):
            return TorchTransport(process_group, index)
        return SharedMemoryTransport(process_group, index, self._host, ranks, timeout)


def joined_processes() -> Processes | None:
    """The world of torch that this process has joined, if any."""
    return Processes() if dist.is_available() and dist.is_initialized() else None
