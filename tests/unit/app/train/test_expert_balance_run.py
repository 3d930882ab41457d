"""A run of a model with experts balances them as its configuration says, and writes their load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train_runs import make, rows, run

from plait.app.train.trainer import model_to_train
from plait.checkpoint.full_tensors import FullTensors
from plait.errors import ConfigError
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import Router

SPARSE = {"name": "llama", "layers": 2, "experts": 4, "top_k": 2, "inner": 16}


def test_a_run_with_experts_writes_their_losses_and_load_and_equals_one_rank(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    config = make(tmp_path, dp=2, model=SPARSE, balance_weight=0.01, z_weight=0.001, compare=2)
    results = run(thread_ranks, config)
    assert all(result.matches for result in results)
    loads = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert [one["step"] for one in loads] == [1, 2, 3, 4]
    for row, load in zip(rows(tmp_path), loads, strict=True):
        assert len(load["tokens"]) == 2
        assert all(sum(one) == row["tokens"] * 2 for one in load["tokens"].values())
        assert row["balance_loss"] >= 1.9, "2 where all experts have the same load"
        assert row["z_loss"] > 0
        most = max(4 * max(one) / sum(one) for one in load["tokens"].values())
        assert row["largest_expert_load"] == pytest.approx(most)
    assert "balance_loss" in (tmp_path / "report.html").read_text()


@pytest.mark.full
def test_a_run_corrects_the_choice_of_experts_and_equals_one_rank(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    config = make(tmp_path, dp=2, model=SPARSE, bias_rate=0.01, steps=3, compare=2)
    assert all(result.matches for result in run(thread_ranks, config))
    saved = FullTensors(tmp_path / "checkpoints")
    names = [name for name in saved.manifest.tensors if name.endswith("router.e_score_correction_bias")]
    assert len(names) == 2
    for name in names:
        steps = saved.read(name) / 0.01
        assert 0.99 < steps.abs().max() < 3.01, "the rate, up or down, in each of three steps"
        torch.testing.assert_close(steps, steps.round())


def test_a_run_whose_routing_is_forced_says_so_in_its_log_metrics_and_report(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line. Of 8 tokens in a row, with 2 of 4 experts, each of two ranks has experts of 7."""
    run(thread_ranks, make(tmp_path, dp=2, ep=2, model=SPARSE, forced_routing=True, steps=2))
    assert capsys.readouterr().out.count("Routing is forced to be balanced") == 1
    loads = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    for row, load in zip(rows(tmp_path), loads, strict=True):
        assert row["forced_routing"] == load["forced_routing"] == 1
        assert row["largest_expert_load"] == pytest.approx(1)
        assert load["sent"] == load["received"]
        assert row["tokens_sent"] == sum(load["sent"]) == 2 * row["tokens"] * 7 / 8
    assert "Routing was forced to be balanced" in (tmp_path / "report.html").read_text()


def test_a_dense_model_has_no_numbers_of_experts(thread_ranks: RankPool, tmp_path: Path) -> None:
    run(thread_ranks, make(tmp_path))
    assert not (tmp_path / "experts.jsonl").exists()
    assert not any("expert" in name or "balance" in name for name in rows(tmp_path)[0])


@pytest.mark.parametrize(
    ("options", "balance"),
    [
        ({}, Balance()),
        ({"balance_weight": 0.1}, Balance(0.1)),
        (
            {"balance_weight": 0.1, "z_weight": 0.2, "balance": "coupled step"},
            Balance(0.1, 0.2, 0.0, "step", True),
        ),
        ({"balance": "previous"}, Balance(counts="previous")),
        ({"forced_routing": True}, Balance(forced_routing=True)),
    ],
    ids=str,
)
def test_routers_have_the_settings_of_the_configuration(
    tmp_path: Path, options: dict[str, object], balance: Balance
) -> None:
    model = model_to_train(make(tmp_path, model=SPARSE, **options), vocab=20)
    found = [module.balance for module in model.modules() if isinstance(module, Router)]
    assert found == [balance, balance]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ({}, {"balance_weight": 0.1}, "train.balance_weight = 0.1 balances experts, and the model has none"),
        ({}, {"balance": "step"}, "train.balance = step balances experts"),
        ({}, {"forced_routing": True}, "train.forced_routing = True balances experts"),
    ],
    ids=str,
)
def test_a_balance_of_what_the_model_has_not_is_refused(
    tmp_path: Path, model: dict[str, object], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(tmp_path, model=model, **options)
