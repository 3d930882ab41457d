"""`run_elastic`: call a function in ranks that are restarted when one is lost, and return all results."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.agent.server.api import Worker

from plait.errors import MeshError, PlaitError, listed
from plait.ranks.exchange_with_supervisor import removed_at_end, variables_of_supervisor
from plait.ranks.failure.process_watch import OrphanWatch
from plait.ranks.failure.rank_activity import variables_of_activity
from plait.ranks.gpu_sharing import newer_nccl
from plait.ranks.launch.elastic.host_hub import HostRun
from plait.ranks.launch.elastic.one_host_rendezvous import OneHostRendezvous
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.several_hosts_rendezvous import HostPlace, SeveralHostsRendezvous
from plait.ranks.launch.elastic.supervised_process import SupervisedProcess, activity_path
from plait.ranks.launch.elastic.supervisor import Supervisor
from plait.ranks.launch.fork_server import start_process
from plait.ranks.launch.rank_job import RankJob, pickled_call, unpickled_result
from plait.ranks.launch.rank_main_loop import serve
from plait.ranks.launch.temporary_run_folder import run_folder
from plait.ranks.launcher_environment import World, derived_ports

Result = TypeVar("Result")

_CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_PRELOADED = ("plait.checkpoint.snapshots.snapshots",)
"""What restarted ranks need: imported once, before there are ranks."""


def run_elastic(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    elastic: Elastic,
    *,
    ranks: int,
    threads: int,
    timeout: float,
    device: str,
    ranks_per_gpu: int,
) -> list[Result]:
    """Call `function(*arguments)` in ranks on this host, again after each failure; return all results.

    Arguments are those of `launch`. Raises the error of a failure that has happened three times, and
    MeshError where `elastic` names several hosts.
    """
    if len(elastic.hosts) > 1:
        raise MeshError(
            f"Elastic's hosts (run.hosts) are {listed(elastic.hosts)}, but no launcher started this process, "
            "whose ranks are all on this host: start it once on each of them, by srun or torchrun, or leave "
            "hosts out."
        )
    options = {"threads": threads, "timeout": timeout, "device": device, "ranks_per_gpu": ranks_per_gpu}
    rendezvous = OneHostRendezvous(secrets.token_hex(8))
    results = _supervised(function, arguments, elastic, rendezvous, ranks, options)
    return [unpickled_result(one, rank) for rank, one in enumerate(results)]


def run_elastic_host(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    elastic: Elastic,
    world: World,
    *,
    ranks: int,
    threads: int,
    timeout: float,
    device: str,
    ranks_per_gpu: int,
) -> list[Result]:
    """Call `function(*arguments)` in elastic ranks of several hosts, as the supervisor of this one.

    Returns the results of all ranks, as `run_elastic`. `world`: that of the supervisors, of which a launcher
    has started one on each host. `ranks`: of all hosts. Raises MeshError where the launcher has started
    several on a host, the ranks cannot be divided, or `elastic` names another number of hosts.
    """
    hosts = world.world_size
    if world.local_size > 1:
        raise MeshError(
            f"{world.launcher} started {world.local_size} processes on this host, and elastic ranks have one "
            "supervisor there, which starts them: start one process on each host."
        )
    if ranks % hosts:
        raise MeshError(
            f"{world.launcher} started supervisors of elastic ranks on {hosts} hosts, and {ranks} ranks "
            "cannot be divided among them evenly: change the degrees, or the number of hosts."
        )
    if len(elastic.hosts) not in (0, hosts):
        raise MeshError(
            f"{world.launcher} started supervisors of elastic ranks on {hosts} hosts, and Elastic's hosts "
            f"(run.hosts) are {len(elastic.hosts)}: name each host once, in the order of their numbers."
        )
    place = HostPlace(world.rank, *_meeting_place(world), elastic.hosts)
    run = HostRun(world.job, hosts, ranks, elastic.ranks_of, grows_later=elastic.replace == "later")
    options = {"threads": threads, "timeout": timeout, "device": device, "ranks_per_gpu": ranks_per_gpu}
    rendezvous = SeveralHostsRendezvous(place, run, ranks // hosts, timeout)
    with OrphanWatch(world), _ended_for_all(rendezvous):
        _supervised(function, arguments, elastic, rendezvous, ranks // hosts, options)
        return rendezvous.results


def _meeting_place(world: World) -> tuple[str, tuple[int, ...]]:
    """Return where supervisors meet: the host of rank 0, and the ports that it may have there, in order.

    Where torchrun's agent has the port, others that are derived from it.
    """
    host, _, port = world.init_method.removeprefix("tcp://").rpartition(":")
    own = (int(port), *world.further_ports)
    return host.strip("[]"), tuple(derived_ports(f"{world.job} {port}")) if world.agent_store else own


@contextmanager
def _ended_for_all(rendezvous: SeveralHostsRendezvous) -> Iterator[None]:
    """Context in which an error of this supervisor ends the run on the other hosts, too."""
    try:
        yield
    except Exception as error:
        rendezvous.end(str(error).strip().partition("\n")[0].rstrip("."))
        raise
    finally:
        rendezvous.shutdown()


def _supervised(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    elastic: Elastic,
    rendezvous: OneHostRendezvous | SeveralHostsRendezvous,
    ranks: int,
    options: dict[str, Any],
) -> list[bytes]:
    """Return the pickled results of a function that the ranks of this host call, again after each failure."""
    call = pickled_call(function, arguments)
    with run_folder() as folder:

        def start_member(number: int) -> SupervisedProcess:
            library = newer_nccl() if options["ranks_per_gpu"] > 1 else None
            name, module = f"plait-{number}", function.__module__
            return SupervisedProcess(*start_process(serve, name, module, library, _PRELOADED))

        def make_job(worker: Worker, generation: int) -> RankJob:
            own = Path(folder, str(generation))
            own.mkdir(parents=True, exist_ok=True)  # systems clean their folder of temporary files
            rank, size, run = worker.global_rank, worker.world_size, rendezvous.get_run_id()
            place = worker.local_rank, len(rendezvous.ranks(size)[0])
            return RankJob.of_this_process(
                call,
                World(rank, size, *place, "plait", rendezvous.address, (), run, agent_store=True),
                str(own),
                goes_on=True,
                run_folder=folder,
                other_hosts=rendezvous.other_hosts,
                variables=variables_of_supervisor(folder, generation, run)
                | variables_of_activity(activity_path(str(own), rank)),
                **options,
            )

        limit = options["timeout"]
        supervisor = Supervisor(ranks, elastic, rendezvous, start_member, make_job, folder, limit)
        try:
            return supervisor.results()
        except OSError as error:
            if error.errno not in _CANNOT_BE_WRITTEN:
                raise
            raise PlaitError(
                f"the supervisor cannot write to the run's folder {folder} ({error.strerror}): make room, or "
                "set TMPDIR to another folder, and start the run again."
            ) from None
        finally:
            for path in removed_at_end(folder):
                shutil.rmtree(path, ignore_errors=True)
