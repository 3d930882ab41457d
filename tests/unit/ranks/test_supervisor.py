"""Ranks under a supervisor: lost ones are replaced, the others go on in their processes."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState

import plait
from plait.errors import DataError, MeshError, PlaitError, RankError
from plait.ranks.collectives import all_reduce
from plait.ranks.exchange_with_supervisor import WorldChange, possible_ranks
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.supervised_process import SupervisedProcess
from plait.ranks.point_to_point import receive, send

LATER = Elastic(replace="later")
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


def summing_on_gpus(folder: Path, failures: Failures) -> tuple[int, int, float]:
    """Return what `summing` does, in a process that cannot leave a failed world, as those that use GPUs."""
    patch("plait.ranks.launch.rank_main_loop.has_used_accelerator", lambda: True).start()
    return summing(folder, failures)


@pytest.mark.full
@pytest.mark.parametrize(("replace", "spares", "ranks"), [("later", 1, 3), (False, 0, 2)])
def test_ranks_that_can_only_end_are_started_again_as_many_as_were_not_lost_or_all(
    tmp_path: Path, replace: bool | Literal["later"], spares: int, ranks: int
) -> None:
    settings = Elastic(replace=replace, spares=spares)
    results = plait.launch(
        summing_on_gpus, tmp_path, {(0, 1): die}, ranks=3, threads=1, device="cpu", timeout=30.0,
        elastic=settings,
    )  # fmt: skip
    assert [total for _, _, total in results] == [ranks] * ranks
    assert not {process for _, process, _ in results} & {*first_processes(tmp_path)}


@pytest.mark.full
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


class CannotBeSent:
    def __reduce__(self) -> str:
        raise TypeError("no pickle of this")


def fails_by_a_bug(folder: Path, count: int) -> object:
    """Raise an error that is none of plait's, `count` times on rank 1; then return what cannot be sent."""
    mesh = plait.Mesh(dp=2, timeout=20.0)
    with (folder / f"rank-{mesh.rank}").open("a") as file:
        file.write("called\n")
    if mesh.rank == 1 and len((folder / "rank-1").read_text().splitlines()) <= count:
        raise ValueError("a bug of the user's own")
    all_reduce(torch.ones(1), mesh.group("world")).wait()  # no rank returns where the other fails
    return CannotBeSent()


def test_tracebacks_are_printed_and_a_result_that_cannot_be_sent_ends_the_run_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlaitError, match=r"result, of type CannotBeSent, cannot be sent .*no pickle of this"):
        plait.launch(fails_by_a_bug, tmp_path, 1, ranks=2, threads=1, device="cpu", elastic=True)
    told = capfd.readouterr().err
    assert "rank 1 failed: ValueError: a bug of the user's own; the ranks go on" in told
    assert told.count('raise ValueError("a bug of the user') == 1
    # Not three times; a rank is ended when the other has returned, perhaps before it has begun.
    assert max(len(path.read_text().splitlines()) for path in tmp_path.glob("rank-*")) == 2


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
    def interrupt(member: SupervisedProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SupervisedProcess, "end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launched(tmp_path, {}, ranks=2)
    assert not [one for one in multiprocessing.active_children() if one.pid in first_processes(tmp_path)]


WAITS = """
import time, plait
def wait():
    print("runs", flush=True)
    time.sleep(600)
plait.launch(wait, ranks=2, threads=1, device="cpu", elastic=True)
"""


@pytest.mark.full
def test_ranks_whose_supervisor_is_killed_end_and_remove_its_folder(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        [sys.executable, "-c", WAITS], env={**os.environ, "TMPDIR": folder}, stdout=subprocess.PIPE, text=True
    ) as supervisor:  # fmt: skip
        assert supervisor.stdout is not None
        assert [supervisor.stdout.readline() for _ in range(2)] == ["runs\n"] * 2
        assert [*Path(folder).glob("plait-*")] != []
        supervisor.kill()
        supervisor.communicate(timeout=60)  # until the ranks have ended, too
        assert [*Path(folder).glob("plait-*")] == []


def test_several_supervisors_on_a_host_and_ranks_that_hosts_cannot_share_evenly_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(MeshError, match=r"\(run.hosts\) are a, b, but no launcher started this process"):
        plait.launch(die, ranks=2, elastic=Elastic(hosts=("a", "b")))
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="torchrun started 2 processes on this host"):
        plait.launch(die, elastic=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(MeshError, match="2 hosts, and 3 ranks cannot be divided"):
        plait.launch(die, ranks=3, elastic=True)
    with pytest.raises(MeshError, match=r"on 2 hosts, and Elastic's hosts \(run.hosts\) are 1: name each"):
        plait.launch(die, ranks=2, elastic=Elastic(hosts=("node-0",)))
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
    calls = inspect.signature(agent._construct_event).parameters
    assert [*calls][:3] == ["self", "state", "source"]
    assert RunResult(state=WorkerState.FAILED).is_failed()


def growing(folder: Path, failures: Failures) -> list[int]:
    """Return the sizes of the worlds that this rank's number had; leave one of 2 for a larger one."""
    size = dist.get_world_size()
    _, _, total = summing(folder, failures)
    with (folder / f"sizes-{dist.get_rank()}").open("a") as file:
        file.write(f"{size}\n")
    deadline = time.monotonic() + 60
    while size == 2 and possible_ranks() < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert total == size
    if size == 2:
        raise WorldChange("leaves")
    return [int(line) for line in (folder / f"sizes-{dist.get_rank()}").read_text().split()]


@pytest.mark.full
def test_ranks_become_more_when_new_processes_are_ready_and_living_ones_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = plait.launch(
        growing, tmp_path, {(0, 2): die}, ranks=3, threads=1, device="cpu", timeout=30.0, elastic=LATER
    )
    assert [sizes[-2:] for sizes in results] == [[2, 3], [2, 3], [3]]
    for rank in (0, 1):
        assert len({*(tmp_path / f"rank-{rank}").read_text().split()}) == 1
    assert "plait: the run goes on with 3 ranks in place of 2." in capfd.readouterr().err


def test_replace_is_a_flag_or_later_and_hosts_are_names() -> None:
    with pytest.raises(MeshError, match="Elastic's replace"):
        Elastic(replace="soon")  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="Elastic's hosts are 'node-0': give a tuple"):
        Elastic(hosts="node-0")  # type: ignore[arg-type]
