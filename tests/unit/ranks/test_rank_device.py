"""Ranks that share a GPU, with a stand-in for GPUs and NCCL: which ones, their settings, what is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.errors import MeshError
from plait.ranks import accelerator, gpu_sharing
from plait.ranks.failure.failure_log import FailureTrace
from plait.ranks.gpu_sharing import explained_sharing, newer_nccl, ranks_that_share, share_gpu
from plait.ranks.handle import _reason
from plait.ranks.launch import world_membership
from plait.ranks.launcher_environment import World

GPU = torch.device("cuda", 0)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", gpu_sharing._COUNT):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("ranks", "gpus", "most", "shared"),
    [(8, 1, 8, 8), (8, 4, 8, 2), (2, 4, 8, 1), (3, 4, 2, 1), (1, 1, 8, 1)],
)
def test_ranks_are_spread_over_the_gpus_that_there_are(ranks: int, gpus: int, most: int, shared: int) -> None:
    assert ranks_that_share(most, ranks, gpus) == shared


@pytest.mark.parametrize(
    ("ranks", "gpus", "most", "told"),
    [
        (8, 0, 8, "no GPU that NCCL can use: leave ranks_per_gpu out"),
        (6, 4, 8, "6 ranks do not spread evenly over the 4 GPUs"),
        (8, 2, 2, "8 ranks and 2 GPUs: use at most 4 ranks there, or ranks_per_gpu = 4"),
    ],
)
def test_ranks_that_do_not_spread_evenly_over_gpus_are_refused(
    ranks: int, gpus: int, most: int, told: str
) -> None:
    with pytest.raises(MeshError, match=told):
        ranks_that_share(most, ranks, gpus)


@pytest.mark.usefixtures("clean_environment")
def test_nccl_multicast_is_refused_where_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert ranks_that_share(8, 4, 4) == 1
    with pytest.raises(MeshError, match="NCCL_NVLS_ENABLE=1: unset"):
        ranks_that_share(8, 8, 4)


def test_neighbouring_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (accelerator, world_membership):
        monkeypatch.setattr(module, "visible_accelerators", lambda: 2)
    worlds = [World(rank, 8, rank, 8, "plait", "file:///x") for rank in range(8)]
    found = [world_membership._accelerator(world, "auto", {}, shared=4) for world in worlds]
    assert found == [torch.device("cuda", number) for number in (0, 0, 0, 0, 1, 1, 1, 1)]


@pytest.mark.usefixtures("clean_environment")
def test_a_rank_sets_nccl_and_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(accelerator, "total_memory", lambda _: 80 * 2**30)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: fractions.append(given))
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: (2, 29, 7))
    with pytest.raises(MeshError, match=r'this one is 2\.29\.7: pip install "nvidia-nccl-cu\d+>=2\.30"'):
        share_gpu(GPU, 8)
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: (2, 30, 3))
    monkeypatch.setenv("NCCL_MAX_CTAS", "1")
    share_gpu(GPU, 8)
    assert fractions == [(9 / 80, GPU)]
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert os.environ["NCCL_MAX_CTAS"] == "1", "what is set stays"
    assert gpu_sharing.ranks_per_gpu() == 8


@pytest.mark.usefixtures("clean_environment")
def test_errors_of_a_shared_gpu_name_the_ranks_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        return _reason(TimeoutError("timed out"), 5.0, (1,), FailureTrace({}, (1,)))

    assert "share a GPU" not in reason()
    monkeypatch.setenv(gpu_sharing._COUNT, "4")
    assert re.search(
        r"or give the mesh more time\. 4 ranks share a GPU, and all .* fit on it at once", reason()
    )
    with pytest.raises(torch.OutOfMemoryError) as raised, explained_sharing():
        raise torch.OutOfMemoryError("full")
    assert raised.value.__notes__[0].startswith(
        "4 ranks share this GPU, and each may allocate 1/4 of its memory"
    )


def test_a_newer_nccl_is_taken_only_where_the_loaded_one_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"old": (2, 28, 9), "new": (2, 30, 7)}
    monkeypatch.setattr(gpu_sharing, "_version_of", lambda path: versions[Path(path).name])
    monkeypatch.setattr(gpu_sharing.ctypes.util, "find_library", lambda _: "old")
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: (2, 29, 7))
    monkeypatch.delenv(gpu_sharing.LIBRARY, raising=False)
    assert newer_nccl() is None
    monkeypatch.setenv(gpu_sharing.LIBRARY, str(tmp_path / "new"))
    with pytest.raises(MeshError, match="where no file is"):
        newer_nccl()
    (tmp_path / "new").touch()
    assert newer_nccl() == str(tmp_path / "new")
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: (2, 30, 7))
    assert newer_nccl() is None


def test_the_version_of_a_library_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options == {"capture_output": True, "text": True, "timeout": 60, "check": True}
        asked.append(command)
        if command[-1] == "broken":
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, "2 30 7\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_sharing._version_of("libnccl.so.2") == (2, 30, 7)
    assert gpu_sharing._version_of("broken") == ()
    assert [(command[0], command[-1]) for command in asked] == [
        (sys.executable, "libnccl.so.2"),
        (sys.executable, "broken"),
    ]


PROGRAM = """
import os, sys
from dataclasses import replace
from pathlib import Path
from plait.ranks.launch import rank_pool

def mapped():
    return sys.argv[1] in Path("/proc/self/maps").read_text()

with rank_pool.RankPool(1) as pool:
    print(*pool.run(mapped))
rank_pool.newer_nccl = lambda: sys.argv[1]
job_of = rank_pool.RankPool._job  # without a GPU `join_world` refuses to share
rank_pool.RankPool._job = lambda *given: replace(job_of(*given), ranks_per_gpu=1)
with rank_pool.RankPool(1, ranks_per_gpu=2) as pool:
    print(*pool.run(mapped), os.environ.get("LD_PRELOAD"))
"""


@pytest.mark.full
def test_ranks_preload_a_given_nccl_library(tmp_path: Path) -> None:
    """A fork server that runs without it is replaced."""
    source, library = tmp_path / "empty.c", tmp_path / "libempty.so"
    source.write_text("int plait_test_of_preloading;\n")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, library], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "True", "None"]
