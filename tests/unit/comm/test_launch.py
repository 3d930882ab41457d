import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.comm.launch import launch
from plait.comm.transport.world_ranks import current_ranks
from plait.errors import MeshError, RankError

SCRIPT = """
import sys, torch, torch.distributed as dist
from plait.comm.launch import launch
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


def test_alone_it_starts_local_ranks():
    assert launch(lambda x: (dist.get_rank(), dist.get_world_size(), x), 7, ranks=2, device="cpu") == [
        (0, 2, 7),
        (1, 2, 7),
    ]


def test_alone_the_callers_threads_are_shared_out():
    torch.set_num_threads(5)
    try:
        assert launch(torch.get_num_threads, ranks=2, device="cpu") == [2, 2]
    finally:
        torch.set_num_threads(1)


def test_alone_without_a_gpu_the_default_is_one_rank():
    assert launch(dist.get_world_size, device="cpu") == [1]


def inside(asked: int | None) -> Any:
    try:
        return launch(lambda rank: (rank, current_ranks().rank), 7, ranks=asked)
    except MeshError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["rank_pool", "thread_ranks"])
def test_inside_a_rank_the_function_is_called_there(kind: str, request: pytest.FixtureRequest):
    """As in workers that Ray or a script of one's own has started and joined."""
    ranks = request.getfixturevalue(kind)
    assert ranks.run(inside, None, ranks=2) == [[(7, 0), (7, 1)]] * 2
    assert ranks.run(inside, 2, ranks=2) == [[(7, 0), (7, 1)]] * 2
    assert ranks.run(inside, 1, ranks=1) == [[(7, 0)]]
    told = ranks.run(inside, 3, ranks=2)
    assert "launch was called inside rank 1 of 2, for 3 ranks" in told[1]


def test_inside_a_rank_another_device_is_refused(rank_pool):
    def ask() -> str:
        with pytest.raises(MeshError, match="whose world has no NCCL: leave device out"):
            launch(print, device="cuda")

    rank_pool.run(ask, ranks=1)


def test_no_ranks_are_refused():
    with pytest.raises(MeshError, match="ranks is 0: give a whole number"):
        launch(print, ranks=0)


def test_a_failure_is_the_ranks_own():
    def fail():
        raise ValueError("the culprit")

    with pytest.raises(RankError, match="rank 0 failed: ValueError: the culprit"):
        launch(fail)


@pytest.mark.full
def test_under_torchrun(script):
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
def test_under_mpi(script):
    ranks = start_two(script)
    outputs, errors = zip(*(process.communicate(timeout=60) for process in ranks), strict=True)
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert all(output.startswith(EXPECTED.format("pmi")) for output in outputs)


@pytest.mark.full
def test_under_mpi_a_failure_ends_every_rank(script):
    """The ranks join twice: what they compute is returned, then one of them fails."""
    ranks = start_two(script, "fail")
    outputs, errors = zip(*(process.communicate(timeout=60) for process in ranks), strict=True)
    assert all(output.startswith(EXPECTED.format("pmi")) for output in outputs), errors
    assert all(process.returncode != 0 for process in ranks)
    assert "ValueError: the culprit" in errors[1]
    assert "by peer" in errors[0]
