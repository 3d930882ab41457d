"""Short training runs."""

import json
from pathlib import Path
from typing import Any

from plait.app.config.config import Config
from plait.app.train.train_run import TrainingResult, train
from plait.ranks.launch.rank_pool import RankPool

TEXT = str(Path(__file__).with_name("test_loop.py"))
"""Some thousand tokens: the standard library, read on each rank, takes longer than a run."""


def make(
    folder: Path,
    *,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    model: dict[str, object] | None = None,
    **settings: Any,
) -> Config:
    """A model of one block that trains for a moment."""
    run = {"dir": folder, "compare": settings.pop("compare", 0), "tensorboard": False}
    return Config.model_validate(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16} | (model or {}),
            "data": {"source": TEXT},
            "train": {"steps": 4, "batch": 4, "microbatches": 2, "validate_batches": 2, "warmup": 2}
            | settings,
            "parallel": {"pp": pp, "dp": dp, "ep": ep},
            "run": run,
        }
    )


def run(pool: RankPool, config: Config) -> list[TrainingResult]:
    return pool.run(train, config, ranks=config.plan().world)


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
