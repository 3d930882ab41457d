"""A rank that cannot write: all hear of it from the one that failed, nothing is left, and the run goes on."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

import plait
from parity.checkpoints import run_of
from parity.full_disk import Full
from parity.pairs import in_quick
from plait.checkpoint import loading, saving
from plait.checkpoint.file_system_calls import Disk
from plait.errors import CheckpointError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

PLAN = Plan(dp=2, strategy="full", microbatches=2)
PATIENT = 2.5
"""Seconds of the mesh's timeout; rank 0 waits half of it for a rank whose disk has no room for its error."""
FULL_DISKS = [(1, 0, True), (0, 1, True), (0, 8, False)]
"""Which rank, room for how many writes, staged or not: every value. The full run has all."""


def save_twice(path: str, full: int, room: int, staged: bool) -> str:
    """What is said where one rank's disk is full; then with all disks as they should be."""
    with run_of(PLAN, timeout=PATIENT) as run:
        disk = Full(room) if run.engine.mesh.rank == full else Disk()
        staging = saving.StagingBuffer() if staged else None
        with pytest.raises(CheckpointError) as told:
            saving.start_save(run.engine, run.optimizer, Path(path), {}, staging, disk=disk).wait()
        assert not list(Path(path).parent.iterdir())
        run.train(range(1))
        plait.save(run.engine, run.optimizer, path)
        return str(told.value)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("full", "room", "staged"), in_quick(product((0, 1), (0, 1, 8), (False, True)), *FULL_DISKS)
)
def test_every_rank_is_told_which_ranks_disk_is_full(
    rank_pool: RankPool, tmp_path: Path, full: int, room: int, staged: bool
) -> None:
    path = tmp_path / "here" / "one"
    path.parent.mkdir()
    said = rank_pool.run(save_twice, str(path), full, room, staged, ranks=2)
    assert said[0] == said[1]
    assert f"one was not written (rank {full}: No space left on device): make room" in said[0]
    assert [entry.name for entry in path.parent.iterdir()] == ["one"]


def save_apart(folder: str) -> str:
    """Each rank in a folder of its own."""
    with run_of(PLAN) as run, pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "_FOLDER_TIMEOUT", 0.1)
        own = Path(folder, str(run.engine.mesh.rank))
        with pytest.raises(CheckpointError) as told:
            plait.save(run.engine, run.optimizer, own / "one")
        assert not own.exists() or not list(own.iterdir())
        return str(told.value)


def test_a_checkpoint_folder_that_one_host_does_not_see_is_refused(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    said = rank_pool.run(save_apart, str(tmp_path), ranks=2)
    for told in said:
        assert "rank 1 does not see" in told
        assert "give a folder that all hosts share" in told


def load_in_rounds(path: str) -> int:
    """As many rounds as the rank with most has tensors: after each all of them meet."""
    with run_of(Plan(pp=2, microbatches=4)) as run, pytest.MonkeyPatch.context() as patched:
        run.train(range(1))
        plait.save(run.engine, run.optimizer, path)
        before = [shard.clone() for shard in run.engine.parameters()]
        run.train(range(1, 2))
        patched.setattr(loading, "BETWEEN_SYNCS", 1)
        plait.load(run.engine, run.optimizer, path)
        assert all(map(torch.equal, before, run.engine.parameters()))
        return len(before)


def test_load_waits_for_ranks_that_read_more(rank_pool: RankPool, tmp_path: Path) -> None:
    first, last = rank_pool.run(load_in_rounds, str(tmp_path / "one"), ranks=2)
    assert first != last, "or nobody is waited for"


def load_without(path: str, name: str) -> tuple[str, str]:
    """What `load` says where one rank's file is lost, and then where it is another's."""
    with run_of(PLAN) as run:
        run.train(range(1))
        plait.save(run.engine, run.optimizer, path)
        told = []
        for missing in (name, "rank-00000.safetensors"):
            if run.engine.mesh.rank == 0:
                Path(path, missing).rename(Path(path, f"{missing}.lost"))
            before = [shard.clone() for shard in run.engine.parameters()]
            with pytest.raises(CheckpointError) as refusal:
                plait.load(run.engine, run.optimizer, path)
            assert refusal.value.damaged
            assert all(map(torch.equal, before, run.engine.parameters())), "nothing was changed"
            told.append(str(refusal.value))
        return told[0], told[1]


def test_a_lost_file_of_a_rank_is_named_by_load_on_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    said = rank_pool.run(load_without, str(tmp_path / "one"), "rank-00001.safetensors", ranks=2)
    assert said[0] == said[1]
    assert "one is damaged: rank-00001.safetensors is missing: take another checkpoint." in said[0][0]
    assert "one is damaged: rank-00000.safetensors is missing: take another checkpoint." in said[0][1]
