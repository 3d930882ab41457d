"""What checkpoints cost, counted: memory while they are saved and loaded, bytes that each rank writes."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch

import plait
from parity.checkpoints import run_of
from parity.live_bytes import LiveBytes
from parity.pairs import in_quick
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.folders import resolve
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.rank_contents import rank_contents, written_by
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.text_collectives import all_gather_text

PLANS = {
    "none": Plan(dp=2, microbatches=2),
    "full": Plan(dp=2, strategy="full", microbatches=2),
    "tp": Plan(tp=2, microbatches=4),
}
QUICK = (("none", "full"), ("full", "none"), ("full", "tp"), ("tp", "full"))
"""Before and after: from and to each of them; the full run has all."""


def save_it(plan: Plan, path: str) -> None:
    with run_of(plan) as run:
        run.train(range(1))
        plait.save(run.engine, run.optimizer, path)


def peak_of_load(plan: Plan, path: str) -> tuple[int, int]:
    """Bytes alive at most while a fresh engine loads, beside itself; and of the state that it then has."""
    with run_of(plan) as run:
        with LiveBytes() as live:
            for parameter in run.engine.parameters():
                live.own(parameter)
            before = live.count()
            live.most = before
            plait.load(run.engine, run.optimizer, path)
        state = sum(one.nbytes for kept in run.optimizer.state.values() for one in kept.values())
        return live.most - before, state


@pytest.mark.parametrize(("before", "after"), in_quick(product(PLANS, repeat=2), *QUICK))
def test_loading_takes_the_rank_s_part_and_one_tensor(
    thread_ranks: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    path = str(tmp_path / "one")
    thread_ranks.run(save_it, PLANS[before], path, ranks=2)
    tensors = read_manifest(Path(path)).tensors.values()
    largest = max(math.prod(one.shape) for one in tensors) * 4
    for most, state in thread_ranks.run(peak_of_load, PLANS[after], path, ranks=2):
        assert most <= state + largest + 4096, "numbers, and news between ranks"


def bytes_of(plan: Plan, folder: str) -> tuple[int, int, int, int]:
    """That this rank writes, stages, and has alive at most meanwhile; and all of the model and optimizer."""
    with run_of(plan) as run:
        run.train(range(1))
        held = list(rank_contents(run.engine, OptimizerSet.of(run.optimizer)))
        series = CheckpointManager(Path(folder))
        with LiveBytes() as live:
            for one in held:
                live.own(one.shard)
            all_gather_text(
                "", run.engine.mesh.group("world"), run.engine.mesh.device
            )  # shows what ranks share
            before = live.count()
            live.most = before
            series.save(run.engine, run.optimizer, 1, {})
            series.finish()
        written = sum(one.shard.nbytes for one in written_by(held, run.engine.mesh.rank))
        numbers = sum(math.prod(layout.shape) for layout in run.engine.layouts.values())
        return written, series.staging.bytes, live.most - before, numbers * 4 * 3


@pytest.mark.parametrize("name", PLANS)
def test_each_shard_is_written_once_and_bytes_are_shared_out(
    thread_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    told = thread_ranks.run(bytes_of, PLANS[name], str(tmp_path), ranks=2)
    file_bytes = [file.bytes for file in read_manifest(resolve(tmp_path)).files]
    boxes = [len(file.boxes) for file in read_manifest(resolve(tmp_path)).files]
    everything = told[0][3]
    assert everything <= sum(written for written, *_ in told) <= everything + 4 * sum(boxes)
    for (written, staged, alive, _), size, count in zip(told, file_bytes, boxes, strict=True):
        assert abs(written - everything / 2) <= 0.1 * everything
        assert written <= size <= written + 200 * count, "but for the header"
        assert written <= staged <= written + 16 * count
        assert alive <= staged + 4096, "one copy of what is written, and nothing else"


def evaluated(plan: Plan, path: str, *, loads: bool) -> float:
    with run_of(plan, seed=5 if loads else 3) as run:
        if loads:
            plait.load(run.engine, run.optimizer, path)
        else:
            run.train(range(2))
            plait.save(run.engine, run.optimizer, path)
        tokens = torch.arange(8 * 7).view(8, 7) % 29
        share = tokens.chunk(plan.dp)[run.engine.mesh.index("dp")]
        return run.engine.evaluate(share[:, :-1], share[:, 1:]).item()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(microbatches=2, dp=2, precision="bf16", master_precision="fp32"),
        Plan(microbatches=2, dp=2, strategy="full", precision="bf16", master_precision="fp32"),
        Plan(microbatches=2, dp=2, strategy="full", offload="full"),
        Plan(microbatches=2, dp=2, strategy="optimizer", offload="parameters"),
    ],
    ids=str,
)
def test_layers_compute_with_loaded_parameters_where_masters_are_separate(
    thread_ranks: RankPool, tmp_path: Path, plan: Plan
) -> None:
    """Where the optimizer updates other tensors than layers use, these follow before the next pass."""
    path = str(tmp_path / "one")
    before = thread_ranks.run(lambda: evaluated(plan, path, loads=False), ranks=2)
    assert thread_ranks.run(lambda: evaluated(plan, path, loads=True), ranks=2) == before
