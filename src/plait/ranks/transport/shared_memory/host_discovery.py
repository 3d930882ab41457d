"""Host discovery: which ranks of a mesh share a host, and the names of their listeners."""

from __future__ import annotations

import json
import os
import secrets
import socket
import weakref
from collections.abc import Mapping, Sequence

import torch

from plait.ranks.transport.shared_memory.channel import Listener, is_supported
from plait.ranks.transport.shared_memory.group_channels import Channels
from plait.ranks.transport.torch_distributed import TorchTransport

HostInfo = Mapping[str, str]
"""What one rank sends to all when a mesh is made: the identity of its host, and the name of its listener."""
_INFO_BYTES = 512


class HostRanks:
    """The ranks of one mesh that share this rank's host, and the channels opened between them."""

    def __init__(self, listener: Listener, infos: Sequence[HostInfo]) -> None:
        """Store this rank's listener, and the `HostInfo` of each rank of the mesh, in order."""
        self._listener = listener
        self._infos = tuple(infos)
        self._channels: weakref.WeakSet[Channels] = weakref.WeakSet()

    def includes(self, ranks: Sequence[int]) -> bool:
        """Return whether `ranks` all have a listener on one host. The result is the same on each of them."""
        infos = [self._infos[rank] for rank in ranks]
        hosts = [{**info, "listener": ""} for info in infos]
        return all(host == hosts[0] for host in hosts) and all("listener" in info for info in infos)

    def channels(self, ranks: Sequence[int], index: int, label: str, timeout: float) -> Channels:
        """Open channels between `ranks` of this host, closed by `close`. Arguments as for `Channels`."""
        listeners = [self._infos[rank]["listener"] for rank in ranks]
        channels = Channels(self._listener, listeners, index, label, timeout, ranks)
        self._channels.add(channels)
        return channels

    def close(self) -> None:
        """Close all channels and stop listening."""
        for channels in tuple(self._channels):
            channels.close()
        self._listener.close()


def discover_host(world: TorchTransport) -> HostRanks | None:
    """Return the ranks on this rank's host, or None without support for shared memory. All ranks call it.

    Communication: with Gloo one all-gather of 512 bytes over the world, not counted as traffic; else none.
    """
    if not world.carries_cpu_tensors:
        return None
    listener = Listener() if is_supported() else None
    info = host_identity() if listener is None else {**host_identity(), "listener": listener.name}
    text = json.dumps(info).encode()
    assert len(text) <= _INFO_BYTES, "a host name and a few numbers"
    mine = torch.frombuffer(bytearray(text.ljust(_INFO_BYTES)), dtype=torch.uint8)
    everyone = torch.empty(world.size * _INFO_BYTES, dtype=torch.uint8)
    world.all_gather(mine, everyone).wait()
    infos = [json.loads(bytes(row.tolist())) for row in everyone.view(world.size, _INFO_BYTES)]
    return None if listener is None else HostRanks(listener, infos)


def host_identity() -> dict[str, str]:
    """Return this process's host name, boot id, namespaces and user: equal for processes that can connect."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = {space: os.readlink(f"/proc/self/ns/{space}") for space in ("net", "user")}
        return {"host": socket.gethostname(), "boot": boot, "owner": str(os.getuid()), **spaces}
    except OSError:
        return {"host": secrets.token_hex(8)}  # differs from every other rank's
