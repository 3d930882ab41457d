"""`parallel.balance` and `parallel.reorder`: what a run does about its order, and keeps of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import plait
from plait.app.config.config import Config
from plait.app.loop.builtin_callbacks import Progress
from plait.app.train import trainer
from plait.app.train.run_callbacks import SCHEDULE_FILE, reorder
from plait.app.train.train_run import train
from plait.engine import Engine, Recording
from plait.errors import ConfigError
from plait.estimate.measurement.measured_balance import balance
from plait.ranks.launch.rank_pool import RankPool
from plait.schedules.costs import Costs

SLOW = Costs(F=(1, 1), I=(1, 1), W=(1, 1), comm=0.1)


def make(folder: Path, microbatches: int = 4, **parallel: Any) -> Config:
    """Four steps of a small model over two stages."""
    return Config.model_validate(
        {
            "model": {"layers": 2, "hidden": 16, "heads": 2, "context": 16},
            "data": {"source": "random"},
            "train": {"steps": 4, "batch": 4, "microbatches": microbatches, "validate_batches": 1},
            "parallel": {"pp": 2} | parallel,
            "run": {"dir": folder, "tensorboard": False, "progress": False, "compare": 4},
        }
    )


def told(config: Config, costs: Costs | None = None) -> tuple[list[str], list[Any], bool]:
    """As a rank: the lines of a run that are shown, the orders of its steps, and whether one rank agrees."""
    lines: list[str] = []
    orders: list[Any] = []
    show, step = Progress.print, Engine.forward_backward

    def forward_backward(self: Engine, *batch: Any) -> Any:
        if self.plan.pp == 2:
            orders.append(self.schedule.order)
        return step(self, *batch)

    measured = Recording.costs if costs is None else lambda _: costs
    with (
        patch.object(Progress, "print", lambda self, text: (show(self, text), lines.append(text))),
        patch.object(Engine, "forward_backward", forward_backward),
        patch.object(Recording, "costs", measured),
    ):
        report = train(config)
    return lines, orders, report.matches


@pytest.mark.full
def test_with_reordering_the_schedule_is_searched_after_a_step_and_saved(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    results = rank_pool.run(told, make(tmp_path, reorder=2), SLOW, ranks=2)
    lines, orders, matches = results[0]
    assert matches
    assert orders == results[1][1]
    assert orders[0] == orders[1] != orders[2] == orders[3]
    (line,) = [line for line in lines if line.startswith("Order after step 2: auto")]
    assert "in place of 1f1b" in line
    kept = json.loads((tmp_path / SCHEDULE_FILE).read_text())
    assert [tuple(row) for row in kept["order"]] == list(orders[3])
    assert kept["costs"] == {"F": [1, 1], "I": [1, 1], "W": [1, 1], "comm": 0.1}


def test_a_searched_schedule_is_reported_and_saved_with_its_costs(tmp_path: Path) -> None:
    before, after = (plait.schedule(policy, ranks=2, microbatches=4) for policy in ("1f1b", "zb-h1"))
    recording: Any = SimpleNamespace(costs=lambda: SLOW)
    mesh: Any = SimpleNamespace(rank=0)
    for found, told in [
        (before, "1f1b stays, none that is shorter was found."),
        (after, "zb-h1 in place of 1f1b, 13.4 ms a step simulated in place of 14.2, in schedule.json."),
    ]:
        engine: Any = SimpleNamespace(schedule=before)
        engine.reorder = lambda costs, found=found, engine=engine: setattr(engine, "schedule", found) or found
        line = reorder(engine, recording, 2, tmp_path, mesh)
        assert line == f"Order after step 2: {told}"
        kept = json.loads((tmp_path / SCHEDULE_FILE).read_text())
        assert [tuple(row) for row in kept["order"]] == list(found.order)
        assert kept["costs"] == {"F": [1, 1], "I": [1, 1], "W": [1, 1], "comm": 0.1}


def test_without_reordering_the_schedule_is_saved_unchanged(thread_ranks: RankPool, tmp_path: Path) -> None:
    orders, step = list[Any](), Engine.forward_backward

    def forward_backward(self: Engine, *batch: Any) -> Any:
        if self.plan.pp == 2:
            orders.append(self.schedule.order)
        return step(self, *batch)

    with patch.object(Engine, "forward_backward", forward_backward):
        assert thread_ranks.run(train, make(tmp_path, schedule="zb-h1"), ranks=2)[0].matches
    kept = json.loads((tmp_path / SCHEDULE_FILE).read_text())
    assert kept["policy"] == "zb-h1"
    assert [tuple(row) for row in kept["order"]] == list(orders[0]) == list(orders[-1])


def test_with_balance_stages_are_cut_by_measured_layer_times(thread_ranks: RankPool, tmp_path: Path) -> None:
    with patch.object(trainer, "balance", side_effect=balance) as measured:
        reports = thread_ranks.run(train, make(tmp_path, balance="measured"), ranks=2)
    assert reports[0].matches
    assert measured.call_count == 2


def test_layers_are_measured_on_the_rows_of_each_rank(thread_ranks: RankPool, tmp_path: Path) -> None:
    """Where a batch is shared by other ranks than a sequence; and only where it was asked for."""
    degrees = {"pp": 1, "dp": 2, "cp": 2}

    def cut(balance: str, layers: tuple[int, ...] | None) -> tuple[int, object]:
        config = make(tmp_path, 2, **degrees, balance=balance, layers_per_stage=layers)
        plan = config.plan()
        mesh = plait.Mesh(plan)
        read = SimpleNamespace(batch=lambda step, rows: (f"inputs of {step}", rows))
        data: Any = SimpleNamespace(vocab=29, training=read)
        found = trainer.plan_with_measured_cut(config, plan, mesh, data)
        return mesh.index("dp"), found if found != plan else None

    def given(model: Any, plan: plait.Plan, mesh: plait.Mesh, *batch: Any) -> Any:
        return (
            len(next(model.parameters())),
            plan == make(tmp_path, 2, **degrees, balance="measured").plan(),
            *batch,
        )

    with patch.object(trainer, "balance", given):
        for index, found in thread_ranks.run(cut, "measured", None, ranks=4):
            assert found == (29, True, "inputs of 0", slice(2 * index, 2 * index + 2))
        for how, layers in (("counted", None), ("measured", (2,))):
            assert {found for _, found in thread_ranks.run(cut, how, layers, ranks=4)} == {None}


def test_a_step_that_is_never_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.reorder = 5 is more than train\.steps = 4") as caught:
        make(tmp_path, reorder=5)
    assert "set parallel.reorder to at most 4" in str(caught.value)
