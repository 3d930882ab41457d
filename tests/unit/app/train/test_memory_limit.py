"""Whether a run fits is told before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.app.config.config import Config
from plait.app.loop.work_division import WorkDivision
from plait.app.train.predicted_run import division_memory, peak_line, predict_memory, prediction_line
from plait.app.train.trainer import build_model
from plait.errors import ConfigError
from plait.estimate.memory.memory_ledger import Category
from plait.estimate.memory.memory_report import Memory, RankMemory
from plait.plan.plan import Plan
from plait.schedules.search.schedule_by_policy import schedule

CPU = torch.device("cpu")
SMALL = {"layers": 2, "hidden": 32, "heads": 2, "context": 16}


def config_of(limit: float | None, batch: int = 16, optimizer: str = "AdamW", **parallel: object) -> Config:
    return Config.model_validate(
        {
            "model": SMALL,
            "train": {"batch": batch, "microbatches": 2, "optimizer": optimizer},
            "parallel": parallel,
            "run": {"memory_limit": limit},
        }
    )


def told(config: Config) -> str:
    return prediction_line(memory_of(config))


def memory_of(config: Config) -> Memory:
    return predict_memory(config, build_model(config.model, 256), config.plan(), CPU)


def test_predicted_memory_of_a_run_counts_a_ranks_rows_and_its_optimizer() -> None:
    configs = config_of(None, 8), config_of(None, dp=2), config_of(None, optimizer="SGD")
    whole, half, plain = (memory_of(config).ranks[0].at_peak for config in configs)
    assert whole[Category.ACTIVATIONS] == half[Category.ACTIVATIONS] > 0
    assert whole[Category.STATE] > plain[Category.STATE] == 0


def test_the_memory_line_is_about_the_rank_that_holds_most() -> None:
    uses = {Category.GRADIENTS: 500_000, Category.PARAMETERS: 2_500_000, Category.BATCH: 0}
    ranks = (
        RankMemory(0, 2_000_000, {}, "", 2_500_000, 0, 0),
        RankMemory(1, 3_000_000, uses, "", 4_000_000, 0, 0),
    )
    line = "Memory: up to 4.0 MB of tensors a rank (parameters 2.5, gradients 0.5"
    for strategy, unsharded, saved in [
        ("full", 4_000_000, "; 25% less than with strategy none"),
        ("full", 2_400_000, "; 25% more than with strategy none"),
        ("none", 3_000_000, ""),
    ]:
        plan = Plan(dp=2, strategy=strategy)
        assert prediction_line(Memory(plan, ranks, unsharded, True)) == f"{line}{saved})."


def test_a_run_within_the_memory_limit_starts() -> None:
    assert told(config_of(1.0, dp=2)) == told(config_of(None, dp=2))


def test_a_run_that_no_change_fits_into_memory_is_told_to_take_more_ranks() -> None:
    with pytest.raises(ConfigError) as caught:
        told(config_of(1e-6, dp=2))
    told_limit, remedy = str(caught.value).split(": ")
    assert told_limit.endswith("but run.memory_limit is 1e-06")
    assert remedy.startswith(
        "no strategy, offload or size of micro-batches helps, so take more ranks, or lower "
    )
    assert remedy.endswith(" model.context = 16.")


def test_a_run_above_the_memory_limit_is_refused_with_the_smallest_change_that_fits() -> None:
    config = config_of(None, dp=2)
    most = memory_of(config).most
    limit = 0.9 * most / 1e9
    with pytest.raises(ConfigError) as caught:
        told(config_of(limit, dp=2))
    remedy = str(caught.value).split(": set ")[1].rstrip(".")
    changes = dict(change.split(" to ") for change in remedy.split(" and "))
    parallel = {name.partition(".")[2]: value for name, value in changes.items() if "parallel" in name}
    train = {"microbatches": int(changes.get("train.microbatches", 2))}
    assert len(changes) == len(parallel) + ("train.microbatches" in changes)
    changed = config_of(limit, dp=2, **parallel)
    told(changed.model_copy(update={"train": changed.train.model_copy(update=train)}))  # it fits


def test_the_measured_peak_is_printed_beside_the_predicted_one() -> None:
    config = config_of(None, dp=2)
    memory = memory_of(config)
    predicted = f"{memory.most / 1e6:,.1f} MB were predicted."
    assert peak_line(memory, 3e8, CPU).endswith(predicted)
    assert "300.0 MB resident in a rank's process, with Python and torch; of tensors" in peak_line(
        memory, 3e8, CPU
    )
    assert "300.0 MB of tensors allocated on a rank; " in peak_line(memory, 3e8, torch.device("cuda"))


def test_another_division_of_work_is_counted_as_plans_are() -> None:
    """With the cut, the order and the rows of that division."""
    config = config_of(None, pp=2)
    plan, order = config.plan(), schedule("1f1b", ranks=2, microbatches=2)
    memory = division_memory(config, plan, 256, CPU)
    for cut in ((4, 2), (2, 4)):  # of the embedding, two blocks of two layers, and the head
        model = build_model(config.model, 256)
        most = predict_memory(config, model, replace(plan, layers_per_stage=cut), CPU).most
        assert memory.bytes_of(WorkDivision(cut, order, (config.train.batch,))) == most
        assert (memory.bytes_of(WorkDivision(cut, order, (config.train.batch + 1,))) or 0) > most
