import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.errors import MeshError, RankError
from plait.ranks.launch import launch as launch_module
from plait.ranks.launch.launch import launch
from plait.ranks.launch.world_membership import join_world, leave_world
from plait.ranks.launcher_environment import World
from plait.ranks.transport.process_ranks import current_ranks

SCRIPT = """
import sys, torch, torch.distributed as dist
from plait.ranks.launch.launch import launch
from plait.errors import MeshError

def total(offset):
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()

def fail():
    if dist.get_rank() == 1:
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("the culprit")

results = launch(total, 1, device="cpu")
assert not dist.is_initialized()
try:
    launch(total, 1, ranks=5)
except MeshError as error:
    sys.stdout.write(f"{results} {error}\\n")  # one write: two ranks share the pipe
if "fail" in sys.argv:
    launch(fail, device="cpu", timeout=20)  # a rank that has failed is given a twentieth of it to end
"""
EXPECTED = "[(0, 3.0), (1, 3.0)] launch was asked for 5 ranks and {} started 2: "


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def start_two(script, *arguments):
    """Two processes with what MPICH's mpirun tells its ranks."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=os.environ | {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_launch_outside_a_launcher_starts_local_ranks():
    assert launch(lambda x: (dist.get_rank(), dist.get_world_size(), x), 7, ranks=2, device="cpu") == [
        (0, 2, 7),
        (1, 2, 7),
    ]


def test_launch_divides_the_callers_threads_among_local_ranks():
    torch.set_num_threads(5)
    try:
        assert launch(torch.get_num_threads, ranks=2, device="cpu") == [2, 2]
    finally:
        torch.set_num_threads(1)


def test_launch_without_a_gpu_starts_one_rank_by_default():
    assert launch(dist.get_world_size, device="cpu") == [1]


def inside(asked: int | None, elastic: bool = False) -> Any:
    def found(rank: int) -> tuple[int, int, int]:
        return rank, current_ranks().rank, torch.get_num_threads()

    try:
        return launch(found, 7, ranks=asked, threads=2, elastic=elastic)
    except MeshError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["rank_pool", "thread_ranks"])
def test_launch_inside_a_rank_calls_the_function_there(kind: str, request: pytest.FixtureRequest):
    """As in workers that Ray or a script of one's own has started and joined."""
    ranks = request.getfixturevalue(kind)
    assert ranks.run(inside, None, ranks=2) == [[(7, 0, 2), (7, 1, 2)]] * 2
    assert ranks.run(inside, 2, ranks=2) == [[(7, 0, 2), (7, 1, 2)]] * 2
    assert ranks.run(inside, 1, ranks=1) == [[(7, 0, 2)]]
    told = ranks.run(inside, 3, ranks=2)
    assert "launch was called inside rank 1 of 2, for 3 ranks" in told[1]
    told = ranks.run(inside, 2, True, ranks=2)
    assert "launch was called for elastic ranks inside rank 1 of 2, which another program" in told[1]


def test_launch_inside_a_rank_refuses_another_device(rank_pool):
    def ask() -> str:
        with pytest.raises(MeshError, match="whose world has no NCCL: leave device out"):
            launch(print, device="cuda")

    rank_pool.run(ask, ranks=1)


NEVER: dict[str, Any] = {
    "ranks is 0: give a whole number": {"ranks": 0},
    "threads is 0: give a whole number": {"threads": 0},
    "timeout is 0.0: give ": {"timeout": 0.0},
    "device is 'tpu': did you mean cpu": {"device": "tpu"},
    "ranks_as is 'fibres': ": {"ranks_as": "fibres"},
    "ranks as threads run on the CPU": {"ranks_as": "threads", "device": "cuda"},
    "ranks_per_gpu is True: give a whole number": {"ranks_per_gpu": True},
    "ranks_per_gpu is 2, and the ranks were asked to run on the CPU": {"device": "cpu", "ranks_per_gpu": 2},
    "ranks_per_gpu is 3, and": {"ranks_as": "threads", "ranks_per_gpu": 3},
    "up to 2 ranks per GPU were asked for, and this host has no GPU": {"ranks": 2, "ranks_per_gpu": 2},
}


def test_launch_refuses_invalid_arguments():
    for told, given in NEVER.items():
        with pytest.raises(MeshError, match=told):
            launch(print, **given)
    with pytest.raises(MeshError, match="launch was given 7: give a function"):
        launch(7)


def test_by_default_there_are_as_many_ranks_as_the_gpus_take(monkeypatch):
    monkeypatch.setattr(launch_module, "visible_accelerators", lambda: 2)
    assert [launch_module._default_ranks(device, 3) for device in ("auto", "cuda", "cpu")] == [6, 6, 1]
    assert launch(torch.get_num_threads, ranks_as="threads") == [1]


RANK_AND_SIZE = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""The variables by which the launchers tell their ranks."""


def as_ranks_of(launchers: list[str], ports: list[str]) -> list[Any]:
    """Leave the world of the pool, and run as a rank that each of the launchers has started."""
    rank, found = dist.get_rank(), []
    leave_world()
    for launcher, port in zip(launchers, ports, strict=True):
        for names in RANK_AND_SIZE.values():
            for name in names:
                os.environ.pop(name, None)
        of_rank, of_world = RANK_AND_SIZE[launcher]
        os.environ |= {of_rank: str(rank), of_world: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        found.append((launch(total, 1, threads=3, device="cpu", timeout=60.0), dist.is_initialized()))
        for given in ({"ranks": 5}, {"ranks_as": "threads"}):
            with pytest.raises(MeshError, match=f"{launcher} started 2") as refused:
                launch(print, **given)
            found.append(str(refused.value))
    try:
        launch(fail_on_rank_1, device="cpu", timeout=60.0)
    except (ValueError, RuntimeError) as error:
        found.append(str(error))
    return found


def total(offset: int) -> tuple[int, float, int]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the culprit")
    dist.all_reduce(torch.ones(1))


def test_a_process_of_a_launcher_joins_the_others_and_leaves_them(rank_pool):
    """The ranks of a pool stand for processes of launchers; a failure ends the others' waits."""
    launchers = [*RANK_AND_SIZE]
    found = rank_pool.run(as_ranks_of, launchers, [free_port() for _ in launchers], ranks=2)
    for rank, own in enumerate(found):
        assert len(own) == 3 * len(launchers) + 1, "each rank fails, the other one by a wait in vain"
        expected = []
        for launcher in launchers:
            expected += [
                ([(0, 3.0, 3), (1, 3.0, 3)], False),
                f"launch was asked for 5 ranks and {launcher} started 2: give both the same number, or leave "
                "ranks out.",
                f"{launcher} started 2 processes: start the program without it to have threads as ranks.",
            ]
        assert own[:-1] == expected
        assert ("the culprit" in own[-1]) == bool(rank), own[-1]


def join_while_rank_0_connects(folder: str) -> bool:
    """Return whether rank 0 has connected, once this rank has joined a world."""
    rank, connected = dist.get_rank(), Path(folder, "connected")
    leave_world()
    connect = dist.init_process_group

    def slowly(*arguments: Any, **options: Any) -> None:
        connect(*arguments, **options)
        time.sleep(0.3)
        connected.touch()

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(dist, "init_process_group", slowly)
        join_world(World(rank, 2, rank, 2, "plait", f"file://{folder}/store"), 60.0, "cpu")
    return connected.exists()


def test_no_rank_goes_on_while_another_still_connects(rank_pool, tmp_path):
    """One that left at once ended the other's rendezvous."""
    assert rank_pool.run(join_while_rank_0_connects, str(tmp_path), ranks=2) == [True, True]


def size_and_interface() -> tuple[int, str]:
    return dist.get_world_size(), os.environ["GLOO_SOCKET_IFNAME"]


def test_a_failure_under_a_launcher_leaves_the_world_within_a_share_of_its_timeout(monkeypatch):
    """Signals and the launcher are watched meanwhile; without a failure queued work is finished first."""
    noted: list[Any] = []

    def abandon(patience: float) -> None:
        noted.append(patience)
        leave_world()

    monkeypatch.setattr(launch_module, "_abandon", abandon)
    monkeypatch.setattr(launch_module, "Watchdog", lambda name: nullcontext(noted.append(name)))
    monkeypatch.setattr(launch_module, "OrphanWatch", lambda world: nullcontext(noted.append(world.launcher)))
    monkeypatch.setattr(
        launch_module, "finish_queued_work", lambda seconds: noted.append(("finish", seconds))
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for timeout, patience in ((20.0, 1.0), (600.0, 2.0)):
        noted.clear()
        monkeypatch.setenv("MASTER_PORT", free_port())
        with pytest.raises(ZeroDivisionError):
            launch(lambda: 1 / 0, device="cpu", timeout=timeout)
        assert launch(size_and_interface, device="cpu", timeout=timeout) == [(1, "lo")]
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "a later world may be of several hosts"
        monkeypatch.setenv("PLAIT_SET_GLOO_SOCKET_IFNAME", "lo")  # as a program has it that a rank started
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        leave_world()
        assert os.environ.pop("GLOO_SOCKET_IFNAME") == "eth0", "it was set to something else since"
        assert not dist.is_initialized()
        watches = ["rank 0", "torchrun"]
        assert noted == [*watches, patience, *watches, ("finish", timeout)]


@pytest.mark.parametrize("has_left", [True, False])
def test_a_timer_ends_a_process_that_cannot_leave_the_world(monkeypatch, has_left):
    registered: list[Any] = []
    monkeypatch.setattr(launch_module, "leave_world", lambda patience: has_left and patience == 1.5)
    monkeypatch.setattr(launch_module.atexit, "register", lambda *given: registered.append(given))
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        launch_module._abandon(1.5)
    finally:
        handler = signal.signal(signal.SIGALRM, before)
    assert handler is (signal.SIG_IGN if has_left else signal.SIG_DFL)
    assert registered == ([] if has_left else [(signal.setitimer, signal.ITIMER_REAL, 1.5)])


def test_an_exception_of_the_only_rank_is_a_rank_error():
    def fail():
        raise ValueError("the culprit")

    with pytest.raises(RankError, match="rank 0 failed: ValueError: the culprit"):
        launch(fail)


@pytest.mark.full
def test_launch_under_torchrun_runs_on_its_ranks(script):
    torchrun = Path(sys.executable).with_name("torchrun")
    run = subprocess.run(
        [torchrun, "--nproc-per-node", "2", "--master-port", free_port(), script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(EXPECTED.format("torchrun")) == 2


@pytest.mark.full
def test_launch_under_mpi_runs_on_its_ranks(script):
    ranks = start_two(script)
    outputs, errors = zip(*(process.communicate(timeout=60) for process in ranks), strict=True)
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert all(output.startswith(EXPECTED.format("pmi")) for output in outputs)


@pytest.mark.full
def test_a_failure_of_one_rank_under_mpi_ends_every_rank(script):
    """The ranks join twice: what they compute is returned, then one of them fails."""
    ranks = start_two(script, "fail")
    outputs, errors = zip(*(process.communicate(timeout=60) for process in ranks), strict=True)
    assert all(output.startswith(EXPECTED.format("pmi")) for output in outputs), errors
    assert all(process.returncode != 0 for process in ranks)
    assert "ValueError: the culprit" in errors[1]
    assert "by peer" in errors[0]
