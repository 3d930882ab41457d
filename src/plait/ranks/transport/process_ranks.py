"""`Processes`: transports between the processes of torch's world; `current_ranks`: those, or threads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist

from plait.errors import CommunicationError
from plait.ranks.accelerator import CPU, default_device
from plait.ranks.failure.failure_log import FailureLog, failure_log_of_world
from plait.ranks.transport.interface import RankTransports, Transport
from plait.ranks.transport.shared_memory.host_discovery import HostRanks, discover_host
from plait.ranks.transport.shared_memory.transport import SharedMemoryTransport
from plait.ranks.transport.threads.transport import current_thread_rank
from plait.ranks.transport.torch_distributed import (
    TorchTransport,
    backends_of,
    new_process_group,
    set_timeout,
    splits_communicators,
    timeout_of,
)


class Processes:
    """The `RankTransports` of torch's default process group: a rank is a process, on one host or several."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shared_results: dict[Hashable, Any] = {}
        self.failure_log: FailureLog | None = None
        """The failure log in the store of the rendezvous, available after `discover`."""
        self._host: HostRanks | None = None
        self._made: list[dist.ProcessGroup] = []
        self._transports: list[TorchTransport] = []
        self._connected = 0
        """The number of calls of `connect`."""

    @property
    def uses_nccl(self) -> bool:
        """Whether the world's default group has NCCL."""
        return "nccl" in backends_of(None)

    @property
    def timeout(self) -> float | None:
        """Timeout of torch's default process group, in seconds; None where its backend has none."""
        assert dist.group.WORLD is not None
        return timeout_of(dist.group.WORLD, default_device() if self.uses_nccl else CPU)

    def world(self) -> Transport | None:
        """Return a transport over the default process group; None for one rank alone."""
        if self.size == 1:
            return None
        return self._over_world()

    def discover(self, timeout: float) -> None:
        """Open the failure log and find the ranks on this host. Blocks until all ranks have called it."""
        self.failure_log = failure_log_of_world(self.rank, timeout)
        self._host = discover_host(self._over_world())

    def _over_world(self) -> TorchTransport:
        assert dist.group.WORLD is not None
        self._transports.append(TorchTransport(dist.group.WORLD, self.rank))
        return self._transports[-1]

    def connect(
        self, groups: Sequence[tuple[int, ...]], name: str, timeout: float, max_ctas: int | None = None
    ) -> Transport | None:
        """Create the group that has this rank; return its transport. None without a group, or peers in it.

        Only the ranks of a group take part, so that a rank's start does not depend on the size of the world;
        all ranks where communicators are split from the world's (`device_id`), as NCCL requires.
        """
        mesh = "plait/alone" if self.failure_log is None else self.failure_log.prefix
        key = f"{mesh}/{self._connected}"
        self._connected += 1
        mine: TorchTransport | None = None
        for ranks in groups:
            if len(ranks) == 1 or (self.rank not in ranks and not splits_communicators()):
                continue
            made = self._new_group(ranks, name, f"{key}/{ranks[0]}", timeout, max_ctas)
            if made is not None:
                self._made.append(made)
                index, host = ranks.index(self.rank), self._host
                if host is not None and host.includes(ranks):
                    mine = SharedMemoryTransport(made, index, host, ranks, timeout)
                else:
                    mine = TorchTransport(made, index)
                self._transports.append(mine)
        return mine

    def _new_group(
        self, ranks: tuple[int, ...], name: str, key: str, timeout: float, max_ctas: int | None
    ) -> dist.ProcessGroup | None:
        """Create the process group of `ranks`, named `key`; `name` is for errors. None on other ranks."""
        try:
            made = new_process_group(ranks, key, name, timeout, max_ctas)
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
            raise CommunicationError(
                f"rank {self.rank} waits for rank {others} to make the group {name} of the mesh: "
                f"{str(error).splitlines()[0]} (see what that rank is doing, or give the mesh more time)."
            ) from error
        if self.uses_nccl and made is not None:  # plait's watch ends the rank first, with a sentence
            set_timeout(made, default_device(), 2 * timeout + 60)
        return made

    @cached_property
    def own_process_group(self) -> dist.ProcessGroup:
        """The process group of this rank alone, created without communication."""
        made: dist.ProcessGroup | None = dist.group.WORLD
        if self.size > 1:
            made = dist.new_group([self.rank], use_local_synchronization=True, group_desc="alone")
            self._made.append(made)
        assert made is not None
        return made

    def close(self) -> None:
        """Close the socket channels to ranks of this host, and destroy the process groups that were made."""
        if self._host is not None:
            self._host.close()
        for process_group in self._made:
            dist.destroy_process_group(process_group)
        self._made.clear()

    def forget(self) -> None:
        """Close the socket channels to ranks of this host, and drop all references to process groups.

        A group that something still refers to keeps its connections, also when torch has destroyed it; Gloo's
        thread then looks again and again at a message that nobody receives any more, and takes a whole core.
        """
        if self._host is not None:
            self._host.close()
        for transport in self._transports:
            transport.forget_process_group()
        self._transports.clear()
        self._made.clear()
        vars(self).pop("own_process_group", None)


def joined_processes() -> Processes | None:
    """Return the `RankTransports` of torch's default process group, or None if there is no such group."""
    return Processes() if dist.is_available() and dist.is_initialized() else None


def current_ranks() -> RankTransports | None:
    """Return the `RankTransports` of this rank's run, of threads or processes; None outside a run."""
    return current_thread_rank() or joined_processes()
