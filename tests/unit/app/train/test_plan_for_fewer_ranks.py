"""The plan of a run that has lost ranks, and such a run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from parity.slowed import Slowed
from plait.app.config.config import Config
from plait.app.loop.straggler_callback import Stragglers
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.train.launch_by_config import launch_by_config
from plait.app.train.plan_for_fewer_ranks import config_for_ranks, elastic_settings
from plait.app.train.train_run import train
from plait.errors import ConfigError
from plait.ranks.exchange_with_supervisor import possible_ranks

HARDWARE = "cpu-two-cores"


def make(
    *, batch: int = 8, microbatches: int = 1, run: dict[str, Any] | None = None, **parallel: Any
) -> Config:
    model = {"layers": 2, "hidden": 16, "heads": 4, "context": 16}
    settings = {"steps": 8, "batch": batch, "microbatches": microbatches, "warmup": 2, "validate_batches": 1}
    return Config.model_validate(
        {
            "model": model,
            "data": {"source": "random"},
            "train": settings,
            "parallel": parallel,
            "run": run or {},
        }
    )


def found(config: Config | None) -> tuple[int, ...] | None:
    """The degrees pp, dp, cp, tp, replicate, and the number of micro-batches."""
    if config is None:
        return None
    own = config.parallel
    return own.pp, own.dp, own.cp, own.tp, own.replicate, config.train.microbatches


@pytest.mark.parametrize(
    ("parallel", "ranks", "expected"),
    [
        ({"dp": 4}, 4, (1, 4, 1, 1, 1, 1)),
        ({"dp": 4, "batch": 12, "microbatches": 3}, 3, (1, 3, 1, 1, 1, 4)),  # one row at a time
        ({"dp": 4}, 3, (1, 2, 1, 1, 1, 2)),  # 3 ranks cannot share 8 rows
        ({"dp": 4, "replicate": 2}, 2, (1, 2, 1, 1, 2, 2)),
        ({"dp": 6, "replicate": 2, "batch": 12}, 5, (1, 4, 1, 1, 2, 3)),
        ({"pp": 2, "dp": 2, "microbatches": 2}, 3, (2, 1, 1, 1, 1, 4)),
        ({"pp": 2, "tp": 2}, 3, (3, 1, 1, 1, 1, 1)),  # no replica to leave out
        ({"tp": 4}, 3, (3, 1, 1, 1, 1, 1)),
        ({"cp": 2, "tp": 2}, 2, (1, 1, 1, 2, 1, 1)),
        ({"pp": 2, "layers_per_stage": [3, 3]}, 1, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_a_run_on_fewer_ranks_drops_replicas_first_and_keeps_the_batch(
    parallel: dict[str, Any], ranks: int, expected: tuple[int, ...]
) -> None:
    config = make(**parallel)
    changed = config_for_ranks(config, ranks)
    assert found(changed) == expected
    assert changed is not None
    assert changed.train.batch == config.train.batch
    assert found(config_for_ranks(config, changed.plan().world)) == expected  # as its ranks find it


@pytest.mark.parametrize(
    ("parallel", "ranks", "expected"),
    [
        ({"pp": 2, "dp": 2, "microbatches": 2}, 3, (2, 1, 1, 1, 1, 4)),  # a replica less, also where slower
        ({"pp": 4, "batch": 16, "microbatches": 8}, 3, (1, 2, 1, 1, 1, 4)),
        ({"pp": 2, "tp": 2}, 3, (1, 1, 1, 1, 1, 1)),  # so small a model is faster on one rank
    ],
)
def test_with_hardware_other_degrees_are_those_of_the_shortest_predicted_step(
    parallel: dict[str, Any], ranks: int, expected: tuple[int, ...]
) -> None:
    config = make(run={"hardware": HARDWARE}, **parallel)
    changed = config_for_ranks(config, ranks)
    assert found(changed) == expected
    assert changed is not None
    count = changed.plan().world
    again = config_for_ranks(config, count, least=count)  # as its ranks find it
    assert again is not None
    assert again.plan().world == count


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (270_000, (1, 2, 1, 1, 1, 2)),
        (255_000, (2, 1, 1, 1, 1, 4)),
        (200_000, (1, 1, 1, 2, 1, 4)),
        (100_000, (1, 2, 1, 1, 1, 2)),  # none fits: as without hardware
    ],
)
def test_plans_that_need_more_memory_than_the_hardware_has_are_left_out(
    tmp_path: Path, most: int, expected: tuple[int, ...]
) -> None:
    """With shards of everything, fewer replicas hold more."""
    text = files("plait.estimate.time").joinpath(f"hardware_files/{HARDWARE}.toml").read_text()
    file = tmp_path / "small.toml"
    text = re.sub(r"^memory_gib = .*", "memory_gib = 0.001", text, count=1, flags=re.M)
    file.write_text(text.replace("reserved_gib = 0\n", f"reserved_gib = {0.001 - most / 2**30:.12f}\n"))
    config = make(run={"hardware": str(file)}, dp=4, strategy="full")
    assert found(config_for_ranks(config, 2)) == expected


def test_settings_of_restarts_need_elastic_processes() -> None:
    with pytest.raises(ConfigError, match=r"run.spares = 1 is given, but run.elastic is false"):
        make(run={"spares": 1})
    with pytest.raises(ConfigError, match=r"run.replace = false is given, but run.elastic is false"):
        make(run={"replace": False})
    with pytest.raises(ConfigError, match=r"run.hosts = node-0, node-1 is given, but run.elastic is false"):
        make(run={"hosts": ["node-0", "node-1"]})
    with pytest.raises(ConfigError, match=r"run.elastic restarts processes, but run.ranks_as is threads"):
        make(run={"elastic": True, "ranks_as": "threads"})
    with pytest.raises(ConfigError, match=r"run.replace is later, but run.snapshot_every is 0"):
        make(run={"elastic": True, "replace": "later", "snapshot_every": 0})
    with pytest.raises(ConfigError, match=r"run.replace = later is given, but run.elastic is false"):
        make(run={"replace": "later"})
    assert elastic_settings(make()) is None
    later = elastic_settings(make(run={"elastic": True, "replace": "later", "hosts": ["node-0", "node-1"]}))
    assert later is not None
    assert (later.replace, later.hosts) == ("later", ("node-0", "node-1"))
    assert make(run={"elastic": True}).run.snapshot_steps == 10
    assert make(run={"elastic": True, "snapshot_every": 3}).run.snapshot_steps == 3
    assert make().run.snapshot_steps == 0


def mortal(config: Config, folder: Path, killed: dict[int, int], ranks: int) -> int:
    """Train; in some steps a rank is killed, and one after these awaits new processes for all `ranks`.

    Returns the number of steps. Each file of a checkpoint that is opened before a first step is written to
    `opened`.
    """
    run_step, recovers = TrainingLoop.run_step, True

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and recovers and "checkpoints/step-" in str(arguments[0]):
            with (folder / "opened").open("a") as file:
                file.write(f"{arguments[0]}\n")

    def run_or_die(run: TrainingLoop) -> None:
        nonlocal recovers
        recovers = False
        mark = folder / f"killed-{run.done}"
        deadline = time.monotonic() + 60
        while mark.exists() and run.mesh.world < ranks and possible_ranks() < ranks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if run.mesh.rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{run.done}\n")
        if killed.get(run.done) == run.mesh.rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run_step(run)

    sys.addaudithook(see)
    with patch.object(TrainingLoop, "run_step", run_or_die):
        return train(config).steps


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


@pytest.mark.full
@pytest.mark.parametrize("replace", [True, False, "later"])
def test_a_run_outlives_killed_ranks_with_the_losses_of_the_run_that_lost_none(
    thread_ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], replace: bool | str
) -> None:
    def config(folder: Path) -> Config:
        own = {"elastic": True, "replace": replace, "snapshot_every": 1, "snapshot_folder": tmp_path}
        own |= {
            "save_every": 2,
            "dir": folder / "run",
            "tensorboard": False,
            "progress": False,
            "timeout": 60,
            "report": False,
        }
        folder.mkdir()
        return make(run=own, dp=2, strategy="full")

    undisturbed, disturbed = config(tmp_path / "whole"), config(tmp_path / "killed")
    thread_ranks.run(train, undisturbed, ranks=2)
    settings = elastic_settings(disturbed)
    most = 2 if replace else 1
    done = launch_by_config(disturbed, mortal, tmp_path / "killed", {5: 1}, most, elastic=settings)
    assert set(done) == {8}
    whole, again = losses(tmp_path / "whole"), losses(tmp_path / "killed")
    assert again == whole if replace is True else dict(again) == pytest.approx(dict(whole), rel=1e-6)
    assert [step for step, _ in again] == [*range(1, 9)]
    steps = [int(step) for step in (tmp_path / "killed" / "steps").read_text().split()]
    assert steps[:6] == [*range(6)]
    assert steps[6] in (4, 5)  # from memory
    assert not (tmp_path / "killed" / "opened").exists()
    assert "plait: rank 1 was killed by SIGKILL" in capfd.readouterr().err
    used = json.loads((tmp_path / "killed" / "run" / "config.json").read_text())
    assert used["parallel"]["dp"] == most
    assert not [*tmp_path.glob("plait-*")]


def slowed_and_mortal(config: Config, folder: Path, dies_in: int | None) -> tuple[int, ...]:
    """Train with rank 3 at half speed; rank 1 is killed once. Return the layers of each stage at the end."""
    run_step, run_all, cuts = TrainingLoop.run_step, TrainingLoop.run, list[tuple[int, ...]]()

    def run_or_die(run: TrainingLoop) -> None:
        mark = folder / "killed"
        if (run.done, run.mesh.rank) == (dies_in, 1) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run_step(run)
        cuts.append(run.engine.blueprint.layers_per_stage)

    def run_slowly(run: TrainingLoop, callbacks: Sequence[Callback]) -> None:
        at = next(number for number, one in enumerate(callbacks) if isinstance(one, Stragglers)) + 1
        run_all(run, [*callbacks[:at], Slowed(lambda rank, _: 2.0 if rank == 3 else 1.0), *callbacks[at:]])

    with patch.object(TrainingLoop, "run_step", run_or_die), patch.object(TrainingLoop, "run", run_slowly):
        train(config)
    return cuts[-1]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["none", "gradients"])
def test_a_rebalanced_run_keeps_its_stages_when_a_rank_is_replaced(tmp_path: Path, strategy: str) -> None:
    """From replicas, and from a snapshot."""
    found = {}
    for name, rebalance, dies_in in (("whole", False, None), ("killed", True, 16)):
        folder = tmp_path / name
        folder.mkdir()
        run = {"elastic": True, "snapshot_every": 4, "snapshot_folder": tmp_path, "rebalance": rebalance}
        run |= {
            "dir": folder / "run",
            "tensorboard": False,
            "progress": False,
            "report": False,
            "timeout": 60,
        }
        config = make(run=run, pp=2, dp=2, microbatches=4, strategy=strategy)
        config = config.model_copy(
            update={
                "train": config.train.model_copy(update={"steps": 20, "precision": "fp64"}),
                "model": config.model.model_copy(update={"layers": 3}),
            }
        )
        cuts = launch_by_config(config, slowed_and_mortal, folder, dies_in, elastic=elastic_settings(config))
        found[name] = cuts[0], losses(folder)
    assert found["killed"][0] != found["whole"][0]
    assert dict(found["killed"][1]) == pytest.approx(dict(found["whole"][1]), rel=1e-12)
