"""The world: this process's rank, its launcher, and the address of the rendezvous, from the environment.

The launchers, in order of precedence (the innermost one first, since `torchrun` may run inside `srun`, and
`mpirun` inside a Slurm job):

| launcher | detected by | rendezvous at |
|---|---|---|
| torchrun, or by hand | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` (both needed) |
| Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | as below |
| MPICH and others with PMI | `PMI_RANK`, `PMI_SIZE` | as below |
| Slurm, inside a step of several tasks | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | as below |

Address: `MASTER_ADDR`, else the first host of the Slurm step, else this host if all ranks are here.
Port: `MASTER_PORT`, else one derived from the job's id, or the next such one where that is taken.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import MeshError
from plait.ranks.launcher_processes import RUN_ID, process_of_launcher, run_of_launcher

_LOOPBACK = "127.0.0.1"
_DERIVED_PORTS = 4
_JOB_IDS = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMI_JOBID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PBS_JOBID",
    "LSB_JOBID",
)


@dataclass(frozen=True)
class World:
    """This process's `rank` of `world_size`, and its `local_rank` of `local_size` on this host.

    `launcher` is `plait`, `torchrun`, `openmpi`, `pmi` or `slurm`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str
    init_method: str
    """Where ranks meet: `tcp://HOST:PORT`, a store, or `file://PATH`, which only this run knows."""
    further_ports: tuple[int, ...] = ()
    """Those that rank 0 takes where another program has the first one."""
    job: str = ""
    """The same for all ranks of a run, another for each run of a launcher; "" where it is unknown."""
    agent_store: bool = False
    """Whether torchrun's agent has the store, which outlives the ranks, and not rank 0."""

    @property
    def port(self) -> int | None:
        """The port of the rendezvous; None for one by a file."""
        port = self.init_method.rpartition(":")[2]
        return int(port) if port.isdecimal() else None


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


def find_world(variables: Mapping[str, str] = os.environ) -> World | None:
    """Return the world of the launcher that started this process, or None. Without communication.

    Raises `MeshError` where the environment, `variables`, is incomplete or contradictory.
    """
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


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those by which a launcher makes this process a rank."""
    if find_world(variables) is None:
        return dict(variables)
    names = {
        name for one in (*_LAUNCHERS, _SLURM) for name in (one.rank, one.size, one.local_rank, one.local_size)
    }
    return {name: value for name, value in variables.items() if name not in names | {"SLURM_STEP_NODELIST"}}


def require_joined() -> None:
    """Raise `MeshError` where a launcher started this process as one of several that are not joined yet."""
    world = find_world()
    if world is not None and world.world_size > 1:
        raise MeshError(
            f"{world.launcher} started this process as rank {world.rank} of {world.world_size}, and it has "
            "not joined the others: run the function by plait.launch, which joins them, or call "
            "torch.distributed.init_process_group first; alone=True makes a mesh of this process only."
        )


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
    job = _job(names, local_size == size, variables)
    address, first, *others = _rendezvous(names, local_size == size, job, variables)
    where, further = f"tcp://{address}:{first}", tuple(map(int, others))
    by_agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and names.launcher == "torchrun"
    return World(rank, size, local_rank, local_size, names.launcher, where, further, job, by_agent)


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
    of_step = names.launcher == "slurm" or variables.get("SLURM_STEP_NUM_TASKS") == str(size)  # `--mpi=pmi2`
    per_node = variables.get("SLURM_STEP_TASKS_PER_NODE") if of_step else None
    if per_node is None:
        return size
    counts = [  # "4(x2),3" is 4, 4, 3
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        for _ in range(int(times or 1))
    ]
    node = int(variables.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else size


def _job(names: _Variables, one_host: bool, variables: Mapping[str, str]) -> str:
    """Return the identity of this run: the job ids of its launcher, or the launcher's process."""
    if names.launcher == "torchrun":
        return variables.get(RUN_ID, "")
    known = [variables[name] for name in _JOB_IDS if name in variables]
    if names.launcher == "pmi" and names.rank in os.environ:
        known += filter(None, [run_of_launcher(names.rank)])
        known = known or ([process_of_launcher(names.rank)] if one_host else [])
    return " ".join(known)


def _rendezvous(
    names: _Variables, one_host: bool, job: str, variables: Mapping[str, str]
) -> tuple[str | int, ...]:
    """Return the host of rank 0, and the ports that it may have there, in order."""
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if names.launcher == "torchrun":
        for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
            if not value:
                raise MeshError(
                    f"the environment has RANK and WORLD_SIZE but not {name}: set it to where rank 0 "
                    "listens, or unset RANK and WORLD_SIZE to run alone."
                )
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST")
    if not address:
        address = _LOOPBACK if one_host else _first_host(nodes) if nodes else None
    if address is None:
        raise MeshError(
            f"the ranks of {names.launcher} are on several hosts and MASTER_ADDR is not set: "
            "set it to the host of rank 0."
        )
    if not port:
        return address, *derived_ports(job)
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise MeshError(f"the environment has MASTER_PORT = {port!r}: it must be a number from 1 to 65535.")
    return address, int(port)


def _first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list: `gpu03` for `gpu[03-05,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, nodes
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def derived_ports(job: str) -> list[int]:
    """Return ports below the ephemeral range, derived from the job: the same on all its ranks."""
    return [10_000 + zlib.crc32(f"{job}/{turn}".encode()) % 20_000 for turn in range(_DERIVED_PORTS)]
