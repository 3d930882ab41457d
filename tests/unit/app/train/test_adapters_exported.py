"""Checkpoints of plait's own models with adapters: merged for transformers, whole for torch, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from parity.one_rank import CONTEXT, SIZES, VOCAB, lively, saved, tensors_in
from plait.app.cli.main import main
from plait.app.config.model_section import ModelConfig
from plait.app.train.trainer import build_model
from plait.checkpoint.manifest import read_manifest

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"name": "gpt2", "tied": True},
    "llama": {"name": "llama", "kv_heads": 3, "inner": 20, "tied": False},
    "head": {"name": "llama", "tied": False, "lora": {"targets": ["query", "head.output"]}},
}
OWN = {"layers": SIZES["layers"], "hidden": SIZES["hidden"], "heads": 6, "context": CONTEXT}
REFUSALS = {
    ("dcp", "--model", "llama"): "the checkpoint has adapters (blocks.0.attention.key, ",
    ("peft",): "is of a model of plait's own, or of one whose folder it does not record: give the folder by",
}
TOKENS = torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))


def adapted(name: str) -> Any:
    """The configuration of a model, and the model, in which every value is drawn."""
    given = {**OWN, **MODELS[name]}
    given["lora"] = {"rank": 2, "alpha": 6.0, **given.get("lora", {})}
    return given, lively(build_model(ModelConfig.model_validate(given), VOCAB))


def export(path: Path, target: Path, form: str, *options: str) -> int:
    return main(["checkpoint", "export", str(path), str(target), "--format", form, *options])


@pytest.mark.transformers
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_adapters_change(tmp_path: Path, name: str) -> None:
    import transformers

    given, model = adapted(name)
    saved(model, tmp_path / "saved", {"config": {"model": given}})
    assert export(tmp_path / "saved", tmp_path / "merged", "huggingface") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-4, atol=1e-4)


def with_optimizer(path: Path) -> None:
    """A checkpoint after a step, in which only adapters have a state."""
    _, model = adapted("llama")
    plan = plait.Plan(precision="fp64")
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1))
    engine.forward_backward(TOKENS, TOKENS)
    optimizer.step()
    plait.save(engine, optimizer, path, {"step": 1})


def test_adapters_exported_to_dcp_can_be_imported_again(tmp_path: Path) -> None:
    with_optimizer(tmp_path / "saved")
    assert export(tmp_path / "saved", tmp_path / "dcp", "dcp") == 0
    assert (
        main(["checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "back"), "--format", "dcp"]) == 0
    )
    before, after = (tensors_in(tmp_path / name) for name in ("saved", "back"))
    assert "optim.state.blocks.0.attention.query.down.weight.exp_avg" in before
    assert "optim.state.blocks.0.attention.query.base.weight.exp_avg" not in before
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert read_manifest(tmp_path / "back").optimizer == read_manifest(tmp_path / "saved").optimizer


def test_exporting_adapters_without_a_fitting_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, model = adapted("llama")
    saved(model, tmp_path / "run", {"config": {"model": given}})
    for arguments, reason in REFUSALS.items():
        assert export(tmp_path / "run", tmp_path / "target", *arguments) == 2
        assert reason in capsys.readouterr().err
    saved(model, tmp_path / "loop", {"config": {"model": OWN}})
    assert export(tmp_path / "loop", tmp_path / "target", "huggingface") == 2
    assert "has adapters whose scale it does not record (blocks.0.attention.key, " in capsys.readouterr().err
    given["lora"]["rank"] = 3
    saved(model, tmp_path / "other", {"config": {"model": given}})
    assert export(tmp_path / "other", tmp_path / "target", "huggingface") == 2
    assert "other adapters than its configuration says" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
