"""`plait train --model.name FOLDER`: sizes, weights, refusals, and a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from parity import huggingface_cases as cases
from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.data.chat_encoder import ChatEncoder
from plait.app.train.run_data import load_data
from plait.app.train.train_run import banner, train
from plait.app.train.trainer import build_model, model_to_train
from plait.errors import ConfigError, ModelError
from plait.models.huggingface import from_huggingface
from plait.models.huggingface.pretrained import logits_of, original_in, weights_in
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import Router

pytestmark = pytest.mark.transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of 300 tokens, with its weights."""
    cases.drawn(lambda: cases.llama(vocab_size=300)).float().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def config_of(folder: Path, *options: str) -> Config:
    return config_from_arguments(["--model.name", str(folder), *options])


def test_model_sizes_are_those_of_the_hugging_face_folder(folder: Path) -> None:
    model = config_of(folder, "--parallel.tp", "4").model
    assert (model.layers, model.hidden, model.heads, model.vocab, model.context) == (2, 24, 4, 300, 8)
    assert config_of(folder, "--model.context", "5").model.context == 5
    again = Config.model_validate_json(config_of(folder).model_dump_json())
    assert again == config_of(folder)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (
            ("--model.hidden", "64"),
            "model.hidden = 64 is given with the folder .* where it is 24: leave it out",
        ),
        (("--model.kv_heads", "2"), "model.kv_heads = 2 is given with the folder .* all sizes: leave it out"),
        (
            ("--model.context", "9"),
            "model.context = 9 does not fit the model in .*, which takes 1 to 8 tokens",
        ),
    ],
)
def test_fields_that_contradict_the_folders_config_json_are_refused(
    folder: Path, option: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(folder, *option)


def test_a_folder_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    with pytest.raises(ConfigError, match=r"config\.json describes no model of transformers: .*unheard"):
        config_of(folder)


def test_code_in_a_model_folder_is_not_run_and_no_prompt_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks by default, and takes a yes from whatever is on stdin."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    (tmp_path / "code.py").write_text("import pathlib\npathlib.Path(__file__ + '.ran').touch()\n")
    places = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "code.Own")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": places}))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    reason = r"needs Python code in that folder \(auto_map\), which plait does not run"
    with pytest.raises(ConfigError, match=reason):
        config_of(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        ChatEncoder(str(tmp_path))
    assert not (tmp_path / "code.py.ran").exists()


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gptj", "n_embd": 8, "n_head": 2}))
    with pytest.raises(ModelError, match="GPTJForCausalLM is no model that plait can adapt"):
        build_model(config_of(tmp_path).model, 300)


def test_a_mixture_of_experts_whose_router_is_not_known_is_named_as_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phimoe", "vocab_size": 8, **sizes}))
    with pytest.raises(
        ModelError, match=r"PhimoeForCausalLM is a mixture of experts .num_local_experts = 16 in .* give a "
    ):
        build_model(config_of(tmp_path).model, 300)


def test_a_sparse_folder_says_how_its_experts_are_balanced_unless_the_run_does(tmp_path: Path) -> None:
    cases.olmoe(vocab_size=300, output_router_logits=True).save_pretrained(tmp_path)
    for options, expected in (
        ((), Balance(0.01, counts="step", coupled=True)),
        (("--train.balance_weight", "0.3"), Balance(0.3, counts="step", coupled=True)),
        (("--train.balance", "document"), Balance(0.01, counts="document")),
    ):
        again = Config.model_validate_json(config_of(tmp_path, *options).model_dump_json())
        model = model_to_train(again, 300)
        assert {one.balance for one in model.modules() if isinstance(one, Router)} == {expected}


def test_the_reference_of_a_sparse_folder_runs_in_float64(tmp_path: Path) -> None:
    cases.olmoe().save_pretrained(tmp_path)
    logits = logits_of(original_in(tmp_path).double(), torch.zeros(1, 3, dtype=torch.int64))
    assert logits.dtype == torch.float64


def test_a_tied_head_with_values_of_its_own_is_named(tmp_path: Path) -> None:
    cases.llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, reason in ((embedding.clone(), ""), (embedding + 1, "ties head.lm_head.weight to embedding")):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=reason) if reason else nullcontext():
            assert weights_in(tmp_path, build_model(config_of(tmp_path).model, len(embedding))) is not None


def test_weights_in_another_format_are_refused(folder: Path) -> None:
    model = build_model(config_of(folder).model, 300)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin are no safetensors: "):
        weights_in(folder, model)
    (folder / "pytorch_model.bin").unlink()
    assert weights_in(folder, model) is None


@pytest.mark.parametrize("make", [cases.gpt2, cases.llama])
def test_a_model_that_was_saved_without_its_head_is_read(tmp_path: Path, make: Any) -> None:
    model = make(tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sequence = build_model(config_of(tmp_path).model, config["vocab_size"])
    weights = weights_in(tmp_path, sequence)
    theirs = model.state_dict()
    assert weights is not None
    assert weights.keys() == sequence.state_dict().keys() - {"head.lm_head.weight"}
    assert all(torch.equal(weights[key][...], theirs[sequence.huggingface_names[key]]) for key in weights)


@pytest.mark.parametrize("name", cases.MODELS)
def test_the_weights_of_every_family_are_found(tmp_path: Path, name: str) -> None:
    """Under the names of files, which transformers changes as it reads and writes them."""
    model = cases.MODELS[name]()
    model.save_pretrained(tmp_path)
    sequence = from_huggingface(model)
    weights = weights_in(tmp_path, sequence)
    assert weights is not None
    theirs = model.state_dict()
    missing = sequence.state_dict().keys() - weights.keys()
    assert missing <= ({"head.lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert all(torch.equal(weights[key][...], theirs[sequence.huggingface_names[key]]) for key in weights)


@pytest.mark.parametrize(("has_weights", "told"), [(True, "Weights: those in "), (False, "WARNING: ")])
def test_a_run_says_what_values_it_starts_from(folder: Path, has_weights: bool, told: str) -> None:
    config = config_of(folder)
    lines = list(banner(config, Mesh(config.plan()), load_data(config), 1, 1, has_weights=has_weights))
    line = next(line for line in lines if str(folder) in line and not line.startswith("Model: "))
    assert line.startswith(f"{told}{folder}")
    assert has_weights or "random values (train.seed = 0)" in line


@pytest.mark.full
def test_a_run_begins_with_the_weights_and_matches_one_rank(
    rank_pool: RankPool, folder: Path, tmp_path: Path
) -> None:
    model = {"name": str(folder)}
    training = {"steps": 2, "batch": 4, "microbatches": 2, "validate_batches": 2}
    run = {"dir": tmp_path / "run", "compare": 2, "tensorboard": False}
    parallel = {"pp": 2, "tp": 2, "schedule": "zb-h1"}
    config = Config.model_validate({"model": model, "train": training, "parallel": parallel, "run": run})
    rank_pool.run(cases.load, ranks=4, timeout=600.0)
    reports = rank_pool.run(train, config, ranks=4)
    assert all(report.matches for report in reports)

    inputs, targets = load_data(config).training.batch(0, slice(0, 4))
    theirs = cases.drawn(lambda: cases.llama(vocab_size=300)).float()
    expected = functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
