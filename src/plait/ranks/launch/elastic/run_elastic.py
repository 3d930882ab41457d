"""`run_elastic`: call a function in ranks that are restarted when one is lost, and return all results."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.agent.server.api import Worker

from plait.ranks.failure.rank_activity import variables_of_activity
from plait.ranks.launch.elastic.member import Member, activity_path
from plait.ranks.launch.elastic.one_host import OneHostRendezvous
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.supervisor import Supervisor
from plait.ranks.launch.fork_server import start_process
from plait.ranks.launch.rank_job import RankJob, pickled_call, unpickled_result
from plait.ranks.launch.rank_process import serve
from plait.ranks.launch.run_folder import run_folder
from plait.ranks.rank_device import newer_nccl
from plait.ranks.supervised_rank import removed_at_end, variables_of_supervisor
from plait.ranks.world import World

Result = TypeVar("Result")

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

    Arguments are those of `launch`. Raises the error of a failure that has happened three times.
    """
    call, run_id = pickled_call(function, arguments), secrets.token_hex(8)
    with run_folder() as folder:
        rendezvous = OneHostRendezvous(run_id)

        def start_member(number: int) -> Member:
            library = newer_nccl() if ranks_per_gpu > 1 else None
            name, module = f"plait-{number}", function.__module__
            return Member(*start_process(serve, name, module, library, _PRELOADED))

        def make_job(worker: Worker, generation: int) -> RankJob:
            own = Path(folder, str(generation))
            own.mkdir(exist_ok=True)
            rank, size = worker.global_rank, worker.world_size
            place = worker.local_rank, worker.world_size
            return RankJob.of_this_process(
                call,
                World(rank, size, *place, "plait", rendezvous.address, (), run_id, agent_store=True),
                str(own),
                threads=threads,
                timeout=timeout,
                device=device,
                ranks_per_gpu=ranks_per_gpu,
                goes_on=True,
                run_folder=folder,
                variables=variables_of_supervisor(folder, generation)
                | variables_of_activity(activity_path(str(own), rank)),
            )

        supervisor = Supervisor(ranks, elastic, rendezvous, start_member, make_job, folder, timeout)
        try:
            results = supervisor.results()
        finally:
            for path in removed_at_end(folder):
                shutil.rmtree(path, ignore_errors=True)
        return [unpickled_result(one, rank) for rank, one in enumerate(results)]
