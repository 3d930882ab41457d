"""`plait evaluate`: the numbers of a checkpoint, from any layout, on any plan, on any data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_runs import make, run

import plait
from plait.app.cli.main import main
from plait.app.config.config import Config
from plait.app.data.batches import NO_TARGET, ValidationBatches
from plait.app.train import evaluation
from plait.app.train.evaluation import checkpoint_of, evaluation_config
from plait.app.train.run_data import _require_targets
from plait.app.train.trained_model import TOKENIZER
from plait.checkpoint.full_tensors import FullTensors
from plait.checkpoint.manifest import read_manifest
from plait.errors import CheckpointError, ConfigError, DataError
from plait.ranks.launch.rank_pool import RankPool

THREADS = ["--run.ranks_as", "threads"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, thread_ranks: RankPool) -> Path:
    """The folder of a run on two ranks of pp, in float64, with a text that it has not seen."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_bytes(bytes(32 + number * number % 90 for number in range(16 * 13 + 1)))
    config = make(folder / "run", pp=2, precision="fp64", lr=0.01, steps=2)
    tree = config.model_dump()
    tree["data"] |= {"source": str(folder / "text"), "validation": 0.4}
    run(thread_ranks, Config.model_validate(tree))
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    run_folder, *others = arguments
    assert main(["evaluate", run_folder, "--json", *others, *THREADS]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["data"]
    return found


def by_torch(folder: Path, text: bytes) -> tuple[float, float]:
    """Loss and accuracy of the model in plain PyTorch, of all sequences in one batch."""
    tensors = FullTensors(checkpoint_of(folder))
    model = plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=256, context=16).double()
    values = {name: tensors.read(f"model.{name}") for name, _ in model.named_parameters()}
    tied = {"head.output.weight": values["embedding.token.weight"]}
    model.load_state_dict(values | tied, strict=False, assign=True)
    tokens = torch.tensor([*text])
    count = (len(tokens) - 1) // 16
    inputs, targets = tokens[: count * 16].view(count, 16), tokens[1 : count * 16 + 1].view(count, 16)
    with torch.no_grad():
        logits = model.eval()(inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss.item(), (logits.argmax(-1) == targets).double().mean().item()


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--parallel.dp 2",
        "--parallel.pp 2 --parallel.tp 2 --train.batch 16 --train.microbatches 4",
        "--parallel.cp 2 --train.batch 2 --train.microbatches 1",
    ],
)
def test_evaluation_numbers_are_those_of_plain_torch_on_every_plan(
    trained: Path, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    (found,) = evaluated(capsys, str(trained / "run"), str(trained / "text"), *options.split())
    loss, accuracy = by_torch(trained / "run", (trained / "text").read_bytes())
    assert found["loss"] == pytest.approx(loss, rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    assert found["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert (found["sequences"], found["data"]) == (13, str(trained / "text"))


def test_evaluate_without_data_gives_the_runs_validation_loss(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    for path in ("run", "run/checkpoints", "run/checkpoints/step-00000002"):
        (found,) = evaluated(capsys, str(trained / path))
        assert found["loss"] == pytest.approx(rows[-1]["validation_loss"], rel=1e-12)
    assert main(["evaluate", str(trained / "run"), *THREADS]) == 0
    told = capsys.readouterr().out
    assert "\nheld out " in told
    assert f"{found['loss']:.4f}" in told
    assert sorted(path.name for path in trained.iterdir()) == ["run", "text"]


def test_evaluate_takes_several_named_data_sets(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = json.dumps({name: str(trained / "text") for name in ("prose", "code")})
    found = evaluated(
        capsys, str(trained / "run"), "--data.validation_source", sources, "--train.validate_batches", "1"
    )
    assert [one["data"] for one in found] == ["prose", "code"]
    assert found[0]["which"] == "4 of 13 sequences, evenly spaced (train.validate_batches = 1)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.lr", "1"], r"train\.lr is given, which an evaluation does not take: leave it out"),
        (["--run.save_every", "1"], r"run\.save_every is given, which an evaluation does not take"),
        (["--parallel.tp", "3"], r"model\.heads = 2 is not divisible by parallel\.tp = 3"),
        (["--parallel.strateg", "full"], r"did you mean parallel\.strategy\?"),
    ],
)
def test_fields_that_an_evaluation_does_not_take_are_refused(
    trained: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluation_config(checkpoint_of(trained / "run"), arguments, [])


def test_data_that_would_not_be_read_or_in_other_tokens_are_refused(trained: Path, tmp_path: Path) -> None:
    checkpoint, text = checkpoint_of(trained / "run"), str(trained / "text")
    saved = read_manifest(checkpoint)

    def with_state(state: Mapping[str, Any], *arguments: str, sources: Sequence[str] = ()) -> Config:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "read_manifest", lambda path: replace(saved, state=state))
            return evaluation_config(checkpoint, arguments, sources)

    state: Any = saved.state
    data = state["config"]["data"]
    validated = {**state, "config": {**state["config"], "data": {**data, "validation_source": text}}}
    with pytest.raises(ConfigError, match=r"data\.source is given, but the run validates on data of its own"):
        with_state(validated, "--data.source", text)
    other = {**state, TOKENIZER: "of a corpus that is gone"}
    with pytest.raises(ConfigError, match=r"is not that of the run, or is gone: set data\.tokenizer"):
        with_state(other)
    assert with_state(other, "--data.tokenizer", "bytes", sources=[text]).data.tokenizer == "bytes"
    arrays = {**state, "config": {**state["config"], "data": {**data, "source": "tokens.bin"}}}
    with pytest.raises(ConfigError, match=r"on tokens of an unknown tokenizer, and .*text has none yet: set"):
        with_state(arrays, sources=[text])
    assert with_state(arrays, sources=["other.bin"]).data.validation_source == {"other.bin": "other.bin"}


def test_evaluate_refuses_folders_that_are_no_checkpoint_of_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="nowhere is no folder: give the folder of a checkpoint"):
        checkpoint_of(tmp_path / "nowhere")
    plan = plait.Plan()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), torch.nn.MSELoss())
    plait.save(engine, None, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"has no configuration of `plait train`: evaluate its model in"):
        evaluation_config(checkpoint_of(tmp_path / "plain"), [], [])
    assert main(["evaluate", str(trained / "run"), "--config", "x.toml"]) == 2
    assert "--config is given, but the configuration is that of the checkpoint" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the run has no validation data: name data after RUN"):
        evaluation_config(checkpoint_of(trained / "run"), ["--data.validation", "0"], [])


def test_evaluation_accepts_last_rows_with_a_single_target() -> None:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(context=4), data=SimpleNamespace(validation=0.25, validation_source=None)
    )
    targets = torch.full((5, 4), NO_TARGET)
    rows: Any = SimpleNamespace(count=5, take=lambda numbers: (None, targets[torch.from_numpy(numbers)]))
    batches = ValidationBatches(rows, 2)
    with pytest.raises(DataError, match=r"within model.context = 4: raise data.validation = 0.25 or"):
        _require_targets(config, batches)
    targets[4, 3] = 0
    _require_targets(config, batches)
