"""Which ranks of a world share a host: each says where it is when a mesh is made."""

from __future__ import annotations

import json

import torch

from plait.comm.transport.shared_memory import door, host
from plait.comm.transport.torch_distributed import TorchTransport

_INFO_BYTES = 512


def discover_host(world: TorchTransport) -> host.Host | None:
    """The ranks on this rank's host; None where CPU tensors do not travel. All ranks call it, and block.

    Communication: one all-gather of 512 bytes over the world, not counted as traffic.
    """
    if not world.carries_cpu_tensors:
        return None
    own = door.Door() if door.possible() else None
    info = host.home() if own is None else {**host.home(), "door": own.name}
    everyone = _all_gather(info, world)
    return None if own is None else host.Host(own, everyone)


def _all_gather(info: dict[str, str], world: TorchTransport) -> list[dict[str, str]]:
    """What each rank says of itself, in rank order."""
    text = json.dumps(info).encode()
    assert len(text) <= _INFO_BYTES, "a host name and a few numbers"
    mine = torch.frombuffer(bytearray(text.ljust(_INFO_BYTES)), dtype=torch.uint8)
    everyone = torch.empty(world.size * _INFO_BYTES, dtype=torch.uint8)
    world.all_gather(mine, everyone).wait()
    return [json.loads(bytes(line.tolist())) for line in everyone.view(world.size, _INFO_BYTES)]
