"""Which files of a folder of Hugging Face are read: those that transformers reads, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parity import huggingface_cases as cases
from plait.errors import ModelError
from plait.models.huggingface.pretrained import model_in, weights_in
from plait.models.huggingface.weight_files import INDEX, SINGLE, files_of_tensors

pytestmark = pytest.mark.transformers

SHARDS = "model-0000{}-of-00002.safetensors".format


def write(folder: Path, name: str, *keys: str) -> None:
    folder.mkdir(exist_ok=True)
    save_file({key: torch.ones(2) for key in keys}, folder / name)


def write_index(folder: Path, places: Any, name: str = INDEX) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"weight_map": places}))


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """Two shards and their index, and an older shard beside them."""
    write(tmp_path, SHARDS(1), "a")
    write(tmp_path, SHARDS(2), "b")
    write(tmp_path, "model-90001-of-90001.safetensors", "a", "b")
    write_index(tmp_path, {"a": SHARDS(1), "b": SHARDS(2)})
    return tmp_path


def test_config_json_then_the_single_file_then_the_index_names_the_weights(indexed: Path) -> None:
    assert files_of_tensors(indexed) == {"a": SHARDS(1), "b": SHARDS(2)}
    write(indexed, SINGLE, "a", "b")
    assert files_of_tensors(indexed) == {"a": SINGLE, "b": SINGLE}
    (indexed / "config.json").write_text(json.dumps({"transformers_weights": "other.safetensors"}))
    write(indexed, "other.safetensors", "c")
    assert files_of_tensors(indexed) == {"c": "other.safetensors"}
    (indexed / "config.json").write_text(json.dumps({"transformers_weights": INDEX}))
    assert files_of_tensors(indexed) == {"a": SHARDS(1), "b": SHARDS(2)}


def test_weight_files_of_unknown_names_are_read_if_their_tensors_do_not_clash(tmp_path: Path) -> None:
    assert files_of_tensors(tmp_path) == {}
    write(tmp_path, "mine.safetensors", "a")
    write(tmp_path, "more.safetensors", "b")
    assert files_of_tensors(tmp_path) == {"a": "mine.safetensors", "b": "more.safetensors"}
    write(tmp_path, "most.safetensors", "b")
    with pytest.raises(ModelError, match=r"b is in both more\.safetensors and most\.safetensors"):
        files_of_tensors(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


FLAWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (
        lambda path: (path / SHARDS(2)).unlink(),
        r"model-00002-of-00002\.safetensors is missing, though model\.safetensors\.index\.json names it",
    ),
    "a shard is cut off": (lambda path: cut(path / SHARDS(2)), r"00002-of-00002\.safetensors is damaged"),
    "a shard is junk": (
        lambda path: (path / SHARDS(1)).write_bytes(b"junk" * 9),
        r"00001-of-00002\.safetensors is damaged",
    ),
    "a shard is empty": (lambda path: (path / SHARDS(1)).write_bytes(b""), r"00002\.safetensors is damaged"),
    "a shard is a folder": (
        lambda path: ((path / SHARDS(1)).unlink(), (path / SHARDS(1)).mkdir()),
        r"00001-of-00002\.safetensors cannot be read \(it is a folder\)",
    ),
    "a tensor is in another shard": (
        lambda path: write_index(path, {"a": SHARDS(2), "b": SHARDS(2)}),
        r"index\.json names a \(in model-00002",
    ),
    "a tensor is in two shards": (
        lambda path: write(path, SHARDS(2), "a", "b"),
        "a is in both model-00001-of-00002.safetensors and model-00002",
    ),
    "a tensor is in none": (
        lambda path: write_index(path, {"a": SHARDS(1), "b": SHARDS(2), "c": SHARDS(2)}),
        r"index\.json names c \(in model-00002-of-00002\.safetensors\), which is not there",
    ),
    "a shard is outside": (
        lambda path: write_index(path, {"a": f"../{path.name}/{SHARDS(1)}"}),
        "for a, outside of its folder",
    ),
    "no index is left": (
        lambda path: ((path / INDEX).unlink(), (path / SHARDS(2)).unlink()),
        r"model-00002-of-00002\.safetensors is missing, one of 2 shards",
    ),
    "the index is a list": (lambda path: (path / INDEX).write_text("[]"), "is no JSON object"),
    "the index is deep": (lambda path: (path / INDEX).write_text("[" * 200_000), "cannot be read"),
    "the index maps to numbers": (lambda path: write_index(path, {"a": 1}), "names 1 for a, outside"),
    "the index maps nothing": (lambda path: write_index(path, []), "has no weight_map"),
    "the configuration leads out": (
        lambda path: (path / "config.json").write_text('{"transformers_weights": "../x.safetensors"}'),
        r"transformers_weights = '\.\./x\.safetensors': give the name",
    ),
    "the configuration names no safetensors": (
        lambda path: (path / "config.json").write_text('{"transformers_weights": 3}'),
        "transformers_weights = 3: give the name",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_of_weight_files_are_reported_with_their_names(indexed: Path, flaw: str) -> None:
    do, told = FLAWS[flaw]
    do(indexed)
    with pytest.raises(ModelError, match=told) as refusal:
        files_of_tensors(indexed)
    assert "\n" not in str(refusal.value)


def test_old_shards_beside_new_ones_are_not_read(tmp_path: Path) -> None:
    """As transformers reads them, where the names of the old ones come last."""
    import transformers

    new = cases.drawn(cases.llama).float()
    new.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    old = {name: one + 1 for name, one in new.state_dict().items()}
    save_file(old, tmp_path / "model-99999-of-99999.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    layers = model_in(tmp_path)
    names: dict[str, str] = layers.huggingface_names  # type: ignore[assignment]
    weights = weights_in(tmp_path, layers)
    assert weights is not None
    assert weights.keys() == names.keys()
    assert all(torch.equal(value[...], theirs[names[name]]) for name, value in weights.items())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 3}, r"blocks\.2\.\S+ is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is unexpected"),
        ({"intermediate_size": 16}, r"mlp\.mlp\.gate_proj\.weight is \[20, 24\] and not \[16, 24\]"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(
    tmp_path: Path, changes: dict[str, int], told: str
) -> None:
    cases.llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=f"the weights in .* do not fit its config.json .*{told}"):
        weights_in(tmp_path, model_in(tmp_path))
