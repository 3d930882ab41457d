"""Joining the world, as torch's default process group, and leaving it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping

import torch
import torch.distributed as dist

from plait.errors import CommunicationError, MeshError
from plait.ranks.accelerator import accelerator_of_rank, make_current, visible_accelerators
from plait.ranks.gpu_sharing import ranks_that_share, share_gpu
from plait.ranks.launch.rendezvous import Meeting, meet
from plait.ranks.launcher_environment import World
from plait.ranks.transport.torch_distributed import torch_timeout

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface on which Gloo listens."""
_IS_SET_HERE = "PLAIT_SET_GLOO_SOCKET_IFNAME"
"""The environment variable that has the value which `join_world` has given to `_INTERFACE`."""


def join_world(
    world: World, timeout: float = 600.0, device: str = "auto", ranks_per_gpu: int = 1
) -> dist.distributed_c10d.Store:
    """Make torch's default process group, Gloo for CPU tensors and NCCL for those on GPUs; return its store.

    All ranks of the world must call it. With GPUs, this rank's becomes the current CUDA device. `timeout`:
    seconds that a rank waits for its peers, here and in every operation of the group. `device`: `cpu`,
    `cuda`, or `auto`: CUDA where this host has a GPU for every rank, or the launcher shows each rank a single
    one by `CUDA_VISIBLE_DEVICES`. `ranks_per_gpu`: the most ranks that share a GPU. Raises MeshError where
    the device is not available, or cannot be shared, CommunicationError where the rendezvous failed.
    """
    backend = "gloo"
    shared = 1 if ranks_per_gpu == 1 else ranks_that_share(ranks_per_gpu, world.local_size, _usable(device))
    accelerator = _accelerator(world, device, shared=shared)
    if accelerator is not None:
        make_current(accelerator)
        if ranks_per_gpu > 1:
            share_gpu(accelerator, shared)
        backend = "cpu:gloo,cuda:nccl"
    file = world.init_method.removeprefix("file://")
    if file != world.init_method:
        meeting = Meeting(dist.FileStore(file, world.world_size), True)  # type: ignore[attr-defined]
    else:
        meeting = meet(world, timeout)
    if meeting.on_one_host:
        _communicate_within_host()
    else:
        _unset_interface()
    limit = torch_timeout(timeout)
    meeting.store.set_timeout(limit)
    try:
        dist.init_process_group(
            backend, store=meeting.store, rank=world.rank, world_size=world.world_size, timeout=limit
        )
        # A rank that goes on, and leaves, while a peer still connects would end that peer's rendezvous.
        dist.all_reduce(torch.zeros(1))
    except (RuntimeError, ValueError) as error:
        _unset_interface()
        raise CommunicationError(
            f"rank {world.rank} of {world.world_size} could not join the world of {world.launcher} at "
            f"{world.init_method}: {str(error).splitlines()[0]} (start all ranks, and see what they print)"
        ) from error
    return meeting.store


def _communicate_within_host() -> None:
    """Make Gloo listen at the loopback interface, which other hosts cannot reach, unless another one is set.

    Gloo would look up the host's name, and listen at its address.
    """
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and _INTERFACE not in os.environ:
        os.environ |= {_INTERFACE: loopback[0], _IS_SET_HERE: loopback[0]}


def _unset_interface() -> None:
    """Unset GLOO_SOCKET_IFNAME where `join_world` set it, in this process or in the one that started it.

    For worlds of several hosts. It stays where it was set to something else since.
    """
    value = os.environ.pop(_IS_SET_HERE, None)
    if value is not None and os.environ.get(_INTERFACE) == value:
        del os.environ[_INTERFACE]


def _accelerator(
    world: World, device: str, environment: Mapping[str, str] = os.environ, *, shared: int = 1
) -> torch.device | None:
    """Return this rank's GPU, or None for the CPU; `shared`: the ranks that share each GPU.

    Raises `MeshError` for "cuda" without enough GPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise MeshError(f"the device is {device!r}: choose one of auto, cpu, cuda.")
    count = _usable(device)
    shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    has_its_own = count == 1 and world.launcher != "plait" and len(shown) == 1 and shown != [""]
    if count and (count * shared >= world.local_size or has_its_own):
        return accelerator_of_rank(world.local_rank, shared)
    if device != "cuda":
        return None
    raise MeshError(
        f"device cuda was asked for and {world.local_size} ranks on this host see {count} usable GPUs: "
        "use as many ranks as GPUs, let ranks share them (ranks_per_gpu), show each rank its own by "
        "CUDA_VISIBLE_DEVICES, or use device cpu."
    )


def _usable(device: str) -> int:
    return 0 if device == "cpu" else visible_accelerators()


def leave_world(patience: float = 10.0) -> bool:
    """End the default process group, if any; return False if that took longer than `patience` seconds.

    A thread does it, since ending waits for pending operations, which never complete when a peer is gone.
    """
    _unset_interface()
    if not dist.is_initialized():
        return True
    closing = threading.Thread(target=_end_groups, name="plait-leave", daemon=True)
    closing.start()
    closing.join(patience)
    return not closing.is_alive()


def _end_groups() -> None:
    """Destroy all process groups at the same time, in one thread each.

    Gloo waits up to 10 ms for each connection that it closes, when a group is deallocated: for a mesh of
    eight ranks a quarter of a second, one after the other.
    """
    groups = [[group] for group in dist.distributed_c10d._world.pg_names]  # each the last reference
    dist.destroy_process_group()
    threads = [threading.Thread(target=group.clear, name="plait-leave", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
