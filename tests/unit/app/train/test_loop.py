import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from train_runs import make, rows, run

from plait.app.config.config import Config
from plait.app.config.config_sections import ParallelConfig
from plait.app.train.train_run import TrainingResult, train
from plait.engine import Engine
from plait.errors import NonFiniteError
from plait.ranks.launch.rank_pool import RankPool


def test_a_training_run_writes_its_files_and_matches_one_rank(thread_ranks: RankPool, tmp_path: Path) -> None:
    config = make(
        tmp_path, pp=2, dp=2, microbatches=1, validate_every=3, sample="def ", sample_tokens=5, compare=3
    )
    reports = run(thread_ranks, config)
    written = rows(tmp_path)
    assert [row["step"] for row in written] == [1, 2, 3, 4]
    assert [row["step"] for row in written if "validation_loss" in row] == [3, 4]
    for row in written:
        assert row["tokens"] == 4 * 16
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
        assert row["peak_memory_bytes"] > 50e6
        assert row["grad_norm"] > 0
        assert "mfu" not in row  # a CPU's peak is not known
    assert [row["lr"] for row in written[:2]] == [0.0005, 0.001]
    assert written[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    for report in reports:
        assert (report.loss, report.validation_loss) == (written[-1]["loss"], written[-1]["validation_loss"])
        assert report.sample == reports[0].sample
        assert report.sample is not None
        assert report.sample.startswith("def ")
        assert report.matches
        assert report.comparison is not None
        assert report.comparison.steps == 3
    assert Config.model_validate_json((tmp_path / "config.json").read_text()) == config


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("more", [{"experts": 4, "top_k": 2, "shared": 8}, {}], ids=["sparse", "dense"])
def test_a_llama_matches_one_rank(thread_ranks: RankPool, tmp_path: Path, more: dict[str, int]) -> None:
    model = {"name": "llama", "kv_heads": 1, "inner": 24, **more}
    config = make(tmp_path, pp=2, model=model, sample="def ", sample_tokens=3, compare=2)
    reports = run(thread_ranks, config)
    assert all(report.matches and report.sample for report in reports)
    assert rows(tmp_path)[0]["loss"] == pytest.approx(math.log(256), rel=0.05)


@pytest.mark.parametrize(
    ("parallel", "ranks_as"),
    [
        ({"cp": 2}, "threads"),
        pytest.param(
            {"cp": 2, "pp": 2, "schedule": "zb-h1", "balance": "measured", "reorder": 2},
            "processes",
            marks=pytest.mark.full,
        ),
        pytest.param({"cp": 4, "strategy": "full"}, "processes", marks=pytest.mark.full),
        pytest.param({"cp": 2, "tp": 2, "sequence_parallel": "regather"}, "threads", marks=pytest.mark.full),
        pytest.param(
            {"cp": 2, "dp": 2, "replicate": 2, "strategy": "full"}, "threads", marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_ranks_that_share_sequences_train_as_one_rank(
    thread_ranks: RankPool, rank_pool: RankPool, tmp_path: Path, parallel: dict[str, object], ranks_as: str
) -> None:
    """Sequences of 19 tokens, each counted once; validation and sample, too."""
    pool = thread_ranks if ranks_as == "threads" else rank_pool
    results = {}
    for name, degrees in (("one", {}), ("many", parallel)):
        config = make(
            tmp_path / name,
            model={"heads": 4, "context": 19, "vocab": 256},
            microbatches=1 if "dp" in degrees else 2,
            precision="fp64",
            compare=2,
            sample="def ",
            sample_tokens=4,
        )
        config = config.model_copy(update={"parallel": ParallelConfig.model_validate(degrees)})
        results[name] = run(pool, config)
    (alone,) = results["one"]
    for report in results["many"]:
        assert report.matches
        assert report.sample == alone.sample
        assert report.validation_loss == pytest.approx(alone.validation_loss, rel=1e-12)
    for row, expected in zip(rows(tmp_path / "many"), rows(tmp_path / "one"), strict=True):
        assert row["tokens"] == expected["tokens"] == 4 * 19
        for name in ("loss", "grad_norm", "lr"):
            assert row[name] == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_bf16_and_fp16_training_matches_one_rank(
    thread_ranks: RankPool, tmp_path: Path, precision: str
) -> None:
    config = make(tmp_path, dp=2, microbatches=1, steps=2, precision=precision, compare=2)
    (comparison, _) = (report.comparison for report in run(thread_ranks, config))
    assert comparison is not None
    assert comparison.matches, comparison


def run_without_steps(config: Config) -> TrainingResult:
    """A run whose `Engine.step` forgets the optimizer."""

    def step(self: Engine, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        return self.clip_grad_norm_(max_norm)

    with patch.object(Engine, "step", step):
        return train(config)


def test_a_run_whose_optimizer_skips_a_step_does_not_match_one_rank(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (report,) = rank_pool.run(run_without_steps, make(tmp_path, steps=2, compare=2, lr=0.01), ranks=1)
    assert not report.matches


def test_a_run_on_random_tokens_prints_no_sample(thread_ranks: RankPool, tmp_path: Path) -> None:
    config = make(tmp_path, sample="def ")
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": "random"})})
    (report,) = run(thread_ranks, config)
    assert report.sample is None
    assert report.matches  # nothing was compared


def test_a_loss_that_is_no_number_ends_the_run(thread_ranks: RankPool, tmp_path: Path) -> None:
    config = make(tmp_path, pp=2, lr=1e25, clip=0, warmup=0)
    with pytest.raises(
        NonFiniteError, match=r"^step 2: the (loss|gradient norm) is (nan|inf) on rank 1, stage 1: "
    ):
        run(thread_ranks, config)
    assert len(rows(tmp_path)) == 1


def test_a_validation_loss_that_is_no_number_ends_the_run(thread_ranks: RankPool, tmp_path: Path) -> None:
    config = make(tmp_path, pp=2, lr=1e38, warmup=0, steps=1)
    with pytest.raises(NonFiniteError, match=r"^step 1: the validation loss is nan"):
        run(thread_ranks, config)
