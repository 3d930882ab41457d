"""A rank that waits in vain says for whom, and ends, also where its waits are on a GPU's streams."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plait.ranks.gpu_sharing import newer_nccl

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("hanging_rank.py")
TIMEOUT, SECONDS = 5.0, 120.0
"""Of the mesh, and until the rank must have ended."""


def test_a_hanging_rank_is_named_and_the_other_rank_ends(gpu_ranks: GpuRanks, tmp_path: Path) -> None:
    gpu_ranks.require(2)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "record-"), "OMP_NUM_THREADS": "1"}
    files = [tmp_path / f"said-{rank}" for rank in range(2)]
    ranks, shared = [], str(gpu_ranks.most_per_gpu)
    if gpu_ranks.most_per_gpu > 1 and (library := newer_nccl()):
        world["LD_PRELOAD"] = library
    try:
        for rank, file in enumerate(files):
            with file.open("w") as said:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(PROGRAM), gpu_ranks.device, str(TIMEOUT), shared],
                        env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        code = ranks[0].wait(SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    text = files[0].read_text()
    assert code == 1, text
    assert re.search(
        rf"rank 0 waits for [^\n]* (from|to reach) rank 1 over pp: no answer within {TIMEOUT:g} s", text
    ), text
