"""From one living layout to another: the same bits, each byte sent once, and it goes on as from a file."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from parity.checkpoints import LAYOUTS, Run, adamw, model, plan_of, run_of, tensors_of
from parity.test_checkpoints import check_same_bits
from plait.ranks.launch.rank_pool import RankPool


def moved_run(run: Run | None, name: str, world: int) -> Run | None:
    """The run on this rank in the layout `name`, on the first ranks of the world; None on others."""
    plan = plan_of(name)
    mesh = plait.Mesh(plan, timeout=20.0, ranks=range(plan.world))
    if run is None:
        engine, optimizer = plait.reshard(model(), adamw, plan, mesh, loss=plait.cross_entropy)
    else:
        engine, optimizer = plait.reshard(run.engine, run.optimizer, plan, mesh)
    return None if engine is None else Run(engine, optimizer)


def begun(name: str, world: int) -> Run | None:
    plan = plan_of(name)
    mesh = plait.Mesh(plan, timeout=20.0, ranks=range(plan.world))
    if not mesh.has_this_rank:
        return None
    engine = plait.parallelize(model(), plan, mesh, loss=plait.cross_entropy, seed=3)
    return Run(engine, adamw(engine.parameter_groups(weight_decay=0.1)))


def there_and_on(before: str, after: str, folder: str) -> None:
    """Train, save, move, save what has moved, go on, and save again."""
    world = max(LAYOUTS[before].world, LAYOUTS[after].world)
    run = begun(before, world)
    if run is not None:
        run.train(range(2))
        plait.save(run.engine, run.optimizer, f"{folder}/before")
    run = moved_run(run, after, world)
    if run is not None:
        plait.save(run.engine, run.optimizer, f"{folder}/moved")
        run.train(range(2, 4))
        plait.save(run.engine, run.optimizer, f"{folder}/on")
        run.engine.check_replicas(run.optimizer)


def loaded_and_on(after: str, folder: str) -> None:
    with run_of(plan_of(after)) as run:
        plait.load(run.engine, run.optimizer, f"{folder}/before")
        run.train(range(2, 4))
        plait.save(run.engine, run.optimizer, f"{folder}/loaded-on")


PAIRS = [("one", "full"), ("full-4", "tp"), ("zb-v", "tp-3"), ("cp-tp", "all")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_moved_to_another_layout_goes_on_as_from_a_checkpoint(
    thread_ranks: RankPool, tmp_path: Any, before: str, after: str
) -> None:
    world = max(LAYOUTS[before].world, LAYOUTS[after].world)
    thread_ranks.run(there_and_on, before, after, str(tmp_path), ranks=world)
    check_same_bits(tensors_of(tmp_path / "before"), tensors_of(tmp_path / "moved"))
    thread_ranks.run(loaded_and_on, after, str(tmp_path), ranks=LAYOUTS[after].world)
    check_same_bits(tensors_of(tmp_path / "loaded-on"), tensors_of(tmp_path / "on"))
