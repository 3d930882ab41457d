"""`discover_host`: finds which ranks share a host, and connects them by sockets."""

from __future__ import annotations

import json
import os
import secrets
import socket
import weakref
from collections.abc import Mapping, Sequence

import torch

from plait.ranks.transport.shared_memory.group_socket_messages import Channels
from plait.ranks.transport.shared_memory.peer_sockets import (
    Listener,
    is_supported,
)
from plait.ranks.transport.torch_distributed import TorchTransport

HostInfo = Mapping[str, str]
"""What one rank sends to all when a mesh is made: the identity of its host, and the name of its listener."""


_INFO_BYTES = 512


class HostRanks:
    """Which ranks of a mesh share a host, and the sockets through which such ranks exchange messages."""

    def __init__(self, listener: Listener, infos: Sequence[HostInfo]) -> None:
        """Store this rank's listener, and the `HostInfo` of each rank of the mesh, in order."""
        self._listener = listener
        self._infos = tuple(infos)
        self._channels: weakref.WeakSet[Channels] = weakref.WeakSet()

    def includes(self, ranks: Sequence[int]) -> bool:
        """Return whether all `ranks` are on one host and can exchange messages through sockets there."""
        infos = [self._infos[rank] for rank in ranks]
        hosts = [{**info, "listener": ""} for info in infos]
        return all(host == hosts[0] for host in hosts) and all("listener" in info for info in infos)

    def channels(self, ranks: Sequence[int], index: int, label: str, timeout: float) -> Channels:
        """Return new `Channels` by which these `ranks` of a host exchange messages; `close` closes them."""
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
    """Find which ranks of `world` share a host; None without shared memory here. All ranks call it.

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
