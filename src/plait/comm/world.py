"""The world: this process's rank, its launcher, and the address of the rendezvous.

`find_world` reads the environment; `join_world` and `leave_world` make and end torch's default process group.
The launchers, in order of precedence (the innermost one first, since `torchrun` may run inside `srun`, and
`mpirun` inside a Slurm job):

| launcher | detected by | rendezvous at |
|---|---|---|
| torchrun, or by hand | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` (both needed) |
| Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | as below |
| MPICH and others with PMI | `PMI_RANK`, `PMI_SIZE` | as below |
| Slurm, inside a step of several tasks | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | as below |

Address: `MASTER_ADDR`, else the first host of the Slurm step, else this host if all ranks are here.
Port: `MASTER_PORT`, else one derived from the job's id.
"""

from __future__ import annotations

import datetime
import os
import re
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from plait.device import accelerator_of_rank, make_current, visible_accelerators
from plait.errors import CommunicationError, MeshError

_LOOPBACK = "127.0.0.1"
_JOB_IDS = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PBS_JOBID",
    "LSB_JOBID",
)


@dataclass(frozen=True)
class World:
    """This process's `rank` of `world_size`, and its `local_rank` of `local_size` on this host.

    `launcher` is `plait`, `torchrun`, `openmpi`, `pmi` or `slurm`; `init_method` is the rendezvous, as
    `torch.distributed.init_process_group` takes it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str
    init_method: str


@dataclass(frozen=True)
class _Variables:
    """The names of the environment variables that one launcher sets."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SLURM = _Variables("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def find_world(environment: Mapping[str, str] | None = None) -> World | None:
    """Return the world of the launcher that started this process, or None. Without communication.

    Args:
        environment: read instead of `os.environ`.

    Raises:
        MeshError: the environment is incomplete or contradictory.
    """
    variables = os.environ if environment is None else environment
    for names in _LAUNCHERS:
        if names.rank in variables or names.size in variables:
            return _read(names, variables)
    if "SLURM_STEP_NODELIST" not in variables and "SLURM_STEP_NUM_TASKS" not in variables:
        return None  # no Slurm, or the body of a batch script, which is no task of the step
    names = _SLURM
    if names.size not in variables:
        names = _Variables("slurm", names.rank, "SLURM_NTASKS", names.local_rank, "")
    world = _read(names, variables) if names.size in variables else None
    return world if world is not None and world.world_size > 1 else None


def _read(names: _Variables, variables: Mapping[str, str]) -> World:
    rank, size = (_number(name, names, variables) for name in (names.rank, names.size))
    if not 0 <= rank < size:
        raise MeshError(
            f"{names.rank} = {rank} is not a rank of {names.size} = {size}: correct or unset both."
        )
    local_size = min(size, _local_size(names, size, variables))
    local_rank = rank % local_size
    if names.local_rank in variables:
        local_rank = _number(names.local_rank, names, variables)
    rendezvous = _rendezvous(names, local_size == size, variables)
    return World(rank, size, local_rank, local_size, names.launcher, rendezvous)


def _number(name: str, names: _Variables, variables: Mapping[str, str]) -> int:
    text = variables.get(name)
    if text is None:
        present = names.size if name == names.rank else names.rank
        raise MeshError(
            f"the environment has {present} but not {name}: set both to join a world of ranks, "
            "or unset both to run alone."
        )
    if not text.isdecimal():
        raise MeshError(f"the environment has {name} = {text!r}: it must be a whole number of at least 0.")
    return int(text)


def _local_size(names: _Variables, size: int, variables: Mapping[str, str]) -> int:
    """Return the number of ranks on this host; the world size if the launcher does not set it."""
    if names.local_size in variables:
        return max(1, _number(names.local_size, names, variables))
    per_node = variables.get("SLURM_STEP_TASKS_PER_NODE") if names.launcher == "slurm" else None
    if per_node is None:
        return size
    counts = [  # "4(x2),3" is 4, 4, 3
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        for _ in range(int(times or 1))
    ]
    node = int(variables.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else size


def _rendezvous(names: _Variables, one_host: bool, variables: Mapping[str, str]) -> str:
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if names.launcher == "torchrun":
        for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
            if not value:
                raise MeshError(
                    f"the environment has RANK and WORLD_SIZE but not {name}: set it to where rank 0 "
                    "listens, or unset RANK and WORLD_SIZE to run alone."
                )
        return "env://"
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST")
    if not address:
        address = _LOOPBACK if one_host else _first_host(nodes) if nodes else None
    if address is None:
        raise MeshError(
            f"the ranks of {names.launcher} are on several hosts and MASTER_ADDR is not set: "
            "set it to the host of rank 0."
        )
    return f"tcp://{address}:{port or _port(variables)}"


def _first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list: `gpu03` for `gpu[03-05,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, nodes
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _port(variables: Mapping[str, str]) -> int:
    """Return a port below the ephemeral range, derived from the job id: the same on all ranks of a job."""
    job = " ".join(variables[name] for name in _JOB_IDS if name in variables)
    return 10_000 + zlib.crc32(job.encode()) % 20_000


def join_world(world: World, timeout: float = 600.0, device: str = "auto") -> None:
    """Make torch's default process group: Gloo for CPU tensors and, if GPUs are used, NCCL for CUDA tensors.

    All ranks of the world must call it. With GPUs, this rank's becomes the current CUDA device.

    Args:
        world: this process's rank and rendezvous.
        timeout: seconds that a rank waits for its peers, here and in every operation of the group.
        device: `cpu`, `cuda`, or `auto`: CUDA where this host has a GPU for every rank, or the launcher shows
            each rank a single one by `CUDA_VISIBLE_DEVICES`.

    Raises:
        MeshError: the device is not available.
        CommunicationError: the rendezvous failed.
    """
    backend = "gloo"
    accelerator = _accelerator(world, device)
    if accelerator is not None:
        make_current(accelerator)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend,
            init_method=world.init_method,
            rank=world.rank,
            world_size=world.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {world.rank} of {world.world_size} could not join the world of {world.launcher} at "
            f"{world.init_method}: {str(error).splitlines()[0]} "
            "(start all ranks, and see that the port is free)"
        ) from error


def _accelerator(
    world: World, device: str, environment: Mapping[str, str] = os.environ
) -> torch.device | None:
    """Return this rank's GPU, or None for the CPU. Raises `MeshError` for "cuda" without enough GPUs."""
    if device not in ("auto", "cpu", "cuda"):
        raise MeshError(f"the device is {device!r}: choose one of auto, cpu, cuda.")
    count = 0 if device == "cpu" else visible_accelerators()
    shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    has_its_own = count == 1 and world.launcher != "plait" and len(shown) == 1 and shown != [""]
    if count and (count >= world.local_size or has_its_own):
        return accelerator_of_rank(world.local_rank)
    if device != "cuda":
        return None
    raise MeshError(
        f"device cuda was asked for and {world.local_size} ranks on this host see {count} usable GPUs: "
        "use as many ranks as GPUs, show each rank its own by CUDA_VISIBLE_DEVICES, or use device cpu."
    )


def leave_world(patience: float = 10.0) -> bool:
    """End the default process group, if any; return False if that took longer than `patience` seconds.

    A thread does it, since ending waits for pending operations, which never complete when a peer is gone.
    """
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
    groups = _take_groups()
    threads = [threading.Thread(target=group.clear, name="plait-leave", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _take_groups() -> list[list[dist.ProcessGroup]]:
    """Shut down all process groups; return one list per group, which holds the last reference to it."""
    groups = [[group] for group in dist.distributed_c10d._world.pg_names]
    dist.destroy_process_group()
    return groups
