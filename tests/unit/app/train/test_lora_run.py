"""`plait train --model.lora.rank …`: a run, and its exports to transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity import huggingface_cases as cases
from parity.norm import assert_equal
from plait.app.cli.checkpoint import run as run_checkpoint
from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.config.config_sections import ParallelConfig
from plait.app.train.train_run import train
from plait.app.train.trainer import build_model, initial_weights
from plait.checkpoint.full_tensors import FullTensors
from plait.errors import ConfigError, ModelError
from plait.models.lora import adapters_of
from plait.ranks.launch.rank_pool import RankPool

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of 300 tokens, with its weights."""
    cases.drawn(lambda: cases.llama(vocab_size=300)).float().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def configured(folder: Path, run: Path, **lora: Any) -> Config:
    training = {"steps": 2, "batch": 4, "microbatches": 2, "validate_batches": 1, "warmup": 0, "lr": 0.1}
    return Config.model_validate(
        {
            "model": {"name": str(folder), "lora": lora},
            "train": training,
            "parallel": {"pp": 2, "tp": 2, "schedule": "zb-h1"},
            "run": {"dir": run, "compare": 2, "tensorboard": False, "save_every": 2},
        }
    )


def logits(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(300, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"logits": model(tokens).logits.detach()}


@pytest.mark.full
def test_a_run_is_exported_and_goes_on(thread_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    import transformers

    peft = pytest.importorskip("peft")
    config = configured(folder, tmp_path / "run", rank=2, alpha=6.0, targets=["*.self_attn.*"])
    reports = thread_ranks.run(train, config, ranks=4)
    assert all(report.matches and report.saved for report in reports)
    path = str(tmp_path / "run" / "checkpoints")
    assert run_checkpoint(["export", path, str(tmp_path / "merged"), "--format", "huggingface"]) == 0
    assert run_checkpoint(["export", path, str(tmp_path / "adapter"), "--format", "peft"]) == 0

    load = transformers.AutoModelForCausalLM.from_pretrained
    merged, plain = logits(load(tmp_path / "merged")), logits(load(folder))
    adapted = logits(peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter"))
    assert_equal(adapted, merged, 1e-5, "the value")
    assert not torch.allclose(plain["logits"], merged["logits"], atol=1e-3)

    again = configured(folder, tmp_path / "again", adapter=str(tmp_path / "adapter")).model
    model = build_model(again, 300)
    assert {(one.rank, one.alpha) for one in adapters_of(model).values()} == {(2, 6.0)}
    values, saved = initial_weights(again, model, 0), FullTensors(Path(path))
    assert values is not None
    for name, value in values.items():
        assert torch.equal(value[...], saved.read(f"model.{name}")), name


@pytest.mark.full
def test_adapters_of_experts_are_exported_and_trained_on(thread_ranks: RankPool, tmp_path: Path) -> None:
    import transformers

    peft = pytest.importorskip("peft")
    folder = tmp_path / "mixtral"
    cases.drawn(lambda: cases.mixtral(vocab_size=300)).float().save_pretrained(folder)
    config = configured(folder, tmp_path / "run", rank=2, alpha=6.0, targets=["q_proj", "experts.*"])
    config = config.model_copy(update={"parallel": ParallelConfig(dp=2, ep=2)})
    reports = thread_ranks.run(train, config, ranks=2)
    assert all(report.matches and report.saved for report in reports)
    path = str(tmp_path / "run" / "checkpoints")
    assert run_checkpoint(["export", path, str(tmp_path / "merged"), "--format", "huggingface"]) == 0
    assert run_checkpoint(["export", path, str(tmp_path / "adapter"), "--format", "peft"]) == 0

    load = transformers.AutoModelForCausalLM.from_pretrained
    merged, plain = logits(load(tmp_path / "merged")), logits(load(folder))
    adapted = logits(peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter"))
    assert_equal(adapted, merged, 1e-5, "the value")
    assert not torch.allclose(plain["logits"], merged["logits"], atol=1e-3)

    again = configured(folder, tmp_path / "again", adapter=str(tmp_path / "adapter")).model
    values, saved = initial_weights(again, build_model(again, 300), 0), FullTensors(Path(path))
    assert values is not None
    adapters = [name for name in values if "_adapter." in name]
    assert len(adapters) == 8
    for name in adapters:
        assert torch.equal(values[name][...], saved.read(f"model.{name}")), name


def test_lora_fields_are_read_from_a_nested_section_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nlayers = 2\n[model.lora]\nrank = 4\n")
    targets = ["--model.lora.targets", '["query", "*.mlp.*"]']
    config = config_from_arguments(["--config", str(file), "--model.lora.alpha", "8", *targets])
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 8.0)
    assert config.model.lora.targets == ("query", "*.mlp.*")
    assert len(adapters_of(build_model(config.model, 16))) == 6
    assert adapters_of(build_model(config_from_arguments([]).model, 16)) == {}
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_an_adapter_goes_with_a_folder_that_has_weights_and_without_other_settings(
    tmp_path: Path, folder: Path
) -> None:
    for lora in ({"dropout": 0.1}, {"rank": 4}):
        with pytest.raises(ConfigError, match=r"is given with model.lora.adapter, with a .* of its own"):
            configured(folder, tmp_path, adapter="x", **lora)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"holds no weights, and model.lora.adapter = 'x' was trained beside"
    ):
        initial_weights(configured(folder, tmp_path, adapter="x").model, nn.Sequential(), 0)


def test_invalid_lora_fields_are_refused() -> None:
    for arguments, text in [
        (
            ("--model.lora.rank", "-1"),
            r"model\.lora\.rank is -1 \(from the command line\): give a whole number of at least 0",
        ),
        (("--model.lora.rnk", "1"), r"model\.lora\.rnk .* did you mean model\.lora\.rank"),
        (("--model.lora", "1"), r"model\.lora .* is a section: set one of its fields, such as model\.lora\."),
        (("--model.lora.adapter", "x"), "set model.name to the folder of the model for which"),
        (("--model.lora.alpha", "8"), "model.lora.alpha = 8.0 is given, and without model.lora.rank there"),
        (("--model.lora.dropout", "1"), r"model\.lora\.dropout is 1"),
    ]:
        with pytest.raises(ConfigError, match=text):
            config_from_arguments(arguments)
