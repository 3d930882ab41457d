"""Ranks under a supervisor: lost ones are replaced, the others go on in their processes."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState

import plait
from plait.errors import DataError, MeshError, RankError
from plait.ranks.collectives import all_reduce
from plait.ranks.launch.elastic.member import Member
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.point_to_point import receive, send

Failures = dict[tuple[int, int], Callable[[], None]]
"""What happens to a rank, by its generation, from 0, and its number."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise DataError("the data end")


def summing(folder: Path, failures: Failures) -> tuple[int, int, float]:
    """Return generation, process and sum of ones, after what happens to this rank in this generation."""
    rank = dist.get_rank()
    with (folder / f"rank-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    generation = len((folder / f"rank-{rank}").read_text().splitlines()) - 1
    world = plait.Mesh(dp=dist.get_world_size(), timeout=20.0).group("world")
    total = all_reduce(torch.ones(1), world).wait()
    if happens := failures.get((generation, rank)):
        happens()
    if rank:  # each waits for the one before
        receive(total, world, rank - 1, label="the sum").wait()
    if rank < world.size - 1:
        send(total, world, rank + 1).wait()
    return generation, os.getpid(), total.item()


def first_processes(folder: Path) -> list[int]:
    return [int(path.read_text().split()[0]) for path in sorted(folder.glob("rank-*"))]


def launched(
    folder: Path, failures: Failures, elastic: Elastic | bool = True, ranks: int = 3, timeout: float = 30.0
) -> list[tuple[int, int, float]]:
    return plait.launch(
        summing, folder, failures, ranks=ranks, threads=1, device="cpu", timeout=timeout, elastic=elastic
    )


def test_a_spare_takes_the_place_of_a_killed_rank_and_the_other_processes_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where another rank is killed while the run recovers."""
    results = launched(tmp_path, {(0, 1): die, (1, 2): die}, Elastic(spares=1))
    before = first_processes(tmp_path)
    assert [generation for generation, _, _ in results] == [2, 2, 2]
    assert results[0][1] == before[0]
    assert not {results[1][1], results[2][1]} & set(before)
    assert [total for _, _, total in results] == [3.0] * 3
    told = capfd.readouterr().err
    assert "plait: rank 1 was killed by SIGKILL" in told
    assert "plait: rank 2 was killed by SIGKILL" in told


@pytest.mark.full
def test_without_replacements_the_ranks_become_fewer(tmp_path: Path) -> None:
    results = launched(tmp_path, {(0, 0): die, (1, 1): die}, Elastic(replace=False))
    assert [total for _, _, total in results] == [1.0]
    assert results[0][1] == first_processes(tmp_path)[2]


def test_processes_that_a_smaller_world_leaves_out_become_spares(tmp_path: Path) -> None:
    settings = Elastic(replace=False, ranks_of=lambda ready: {4: 4, 3: 2, 2: 2}.get(ready, 0))
    results = launched(tmp_path, {(0, 3): die, (1, 0): die}, settings, ranks=4)
    assert [total for _, _, total in results] == [2.0, 2.0]
    assert [process for _, process, _ in results] == [first_processes(tmp_path)[place] for place in (2, 1)]


def test_too_few_processes_end_the_run_with_the_failure(tmp_path: Path) -> None:
    settings = Elastic(replace=False, ranks_of=lambda ready: ready if ready == 2 else 0)
    with pytest.raises(RankError, match=r"(?s)rank 1 was killed by SIGKILL.*1 processes are left"):
        launched(tmp_path, {(0, 1): die}, settings, ranks=2)


def test_an_error_that_happens_three_times_ends_the_run_and_the_processes_live_until_then(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="the data end") as caught:
        launched(tmp_path, {(generation, 1): fail for generation in range(3)}, ranks=2)
    assert "happened 3 times" in str(caught.value.__cause__)
    for path in tmp_path.glob("rank-*"):
        processes = path.read_text().split()
        assert processes == processes[:1] * 3


@pytest.mark.full
def test_a_rank_that_is_stopped_is_killed_and_replaced(tmp_path: Path) -> None:
    began = time.monotonic()
    results = launched(tmp_path, {(0, 1): freeze}, timeout=3.0)
    assert [total for _, _, total in results] == [3.0] * 3
    before = first_processes(tmp_path)
    assert [process == old for (_, process, _), old in zip(results, before, strict=True)] == [
        True, False, True,
    ]  # fmt: skip
    assert time.monotonic() - began < 60


def test_a_second_interrupt_while_ranks_end_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(member: Member) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Member, "end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launched(tmp_path, {}, ranks=2)
    assert not [one for one in multiprocessing.active_children() if one.pid in first_processes(tmp_path)]


def test_several_supervisors_on_a_host_and_ranks_that_hosts_cannot_share_evenly_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="torchrun started 2 processes on this host"):
        plait.launch(die, elastic=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(MeshError, match="2 hosts, and 3 ranks cannot be divided"):
        plait.launch(die, ranks=3, elastic=True)
    with pytest.raises(MeshError, match="elastic, unless it is an Elastic, is 2"):
        plait.launch(die, elastic=2)  # type: ignore[arg-type]


def test_torchs_agent_calls_what_the_supervisor_defines() -> None:
    """The private names on which the supervisor relies, and the order of its calls."""
    agent = SimpleElasticAgent
    abstract = {"_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"}
    assert agent.__abstractmethods__ == abstract
    restart = inspect.getsource(agent._restart_workers)
    assert restart.index("_stop_workers(worker_group)") < restart.index("_initialize_workers(worker_group)")
    start = inspect.getsource(agent._initialize_workers)
    assert start.index("_rendezvous(worker_group)") < start.index("_start_workers(worker_group)")
    assert "_assign_worker_ranks(" in inspect.getsource(agent._rendezvous)
    assert "num_nodes_waiting()" in inspect.getsource(agent._invoke_run)
    assert "_shutdown(" in inspect.getsource(agent.run)
    assert RunResult(state=WorkerState.FAILED).is_failed()
