"""Weight files in which each expert has tensors of its own: joined as in the model, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parity import huggingface_cases as cases
from plait.errors import ModelError
from plait.models.huggingface.pretrained import model_in, weights_in

pytestmark = pytest.mark.transformers

Tensors = dict[str, Tensor]


def saved(folder: Path, name: str, change: Callable[[Tensors], object] | None = None) -> Tensors:
    """Save the model as transformers does; return its tensors by their names in the model."""
    model = cases.drawn(cases.MODELS[name]).float()
    model.save_pretrained(folder)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")
    return model.state_dict()


def without_prefix(weights: Tensors) -> None:
    """As a model without its head is saved."""
    for key in [key for key in weights if key.startswith("model.")]:
        weights[key.removeprefix("model.")] = weights.pop(key)


@pytest.mark.parametrize("change", [None, without_prefix])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe-partly-dense", "qwen3-moe", "olmoe"])
def test_tensors_of_single_experts_are_those_of_the_model(
    tmp_path: Path, name: str, change: Callable[[Tensors], object] | None
) -> None:
    theirs = saved(tmp_path, name, change)
    layers = model_in(tmp_path)
    names: dict[str, str] = layers.huggingface_names  # type: ignore[assignment]
    weights = weights_in(tmp_path, layers)
    assert weights is not None
    assert weights.keys() == names.keys()
    assert all(torch.equal(value[...], theirs[names[key]]) for key, value in weights.items())


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


def swapped(weights: Tensors) -> None:
    key = EXPERT.format(1, "w2")
    weights[key] = weights[key].t().contiguous()


def narrower(weights: Tensors) -> None:
    key = EXPERT.format(2, "w1")
    weights[key] = weights[key].half()


def flat(weights: Tensors) -> None:
    for number in range(4):
        key = EXPERT.format(number, "w2")
        weights[key] = weights[key].flatten()


def one_less(weights: Tensors) -> None:
    for matrix in ("w1", "w2", "w3"):
        del weights[EXPERT.format(3, matrix)]


def also_joined(weights: Tensors) -> None:
    weights["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 24, 20)


FLAWS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a matrix is missing": (
        lambda weights: weights.pop(EXPERT.format(2, "w3")),
        r"weights of experts in .* fit each other \(model\.\S+experts\.2\.w3\.weight is missing\)",
    ),
    "a matrix is transposed": (swapped, r"experts\.1\.w2\.weight is \[20, 24\] F32, .* is \[24, 20\] F32"),
    "a matrix has another dtype": (narrower, r"experts\.2\.w1\.weight is \[20, 24\] F16, .*\[20, 24\] F32"),
    "matrices are flat": (flat, r"experts\.0\.w2\.weight is \[480\] F32"),
    "numbers are left out": (
        lambda weights: weights.pop(EXPERT.format(0, "w2")),
        r"experts\.0\.w2\.weight is missing",
    ),
    "an expert is missing": (
        one_less,
        r"do not fit its config\.json \(blocks\.1\.mlp\.mlp\.experts\.gate_up_proj is \[3, 40, 24\] and not "
        r"\[4, 40, 24\]",
    ),
    "a tensor of all experts is there as well": (
        also_joined,
        r"model\.layers\.1\.mlp\.experts\.down_proj is there beside \S+experts\.0\.w2\.weight",
    ),
    "a number is too large": (
        lambda weights: weights.update({EXPERT.format("9" * 7, "w2"): torch.zeros(24, 20)}),
        r"experts\.9999999\.w2\.weight is unexpected",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_in_tensors_of_single_experts_are_named(tmp_path: Path, flaw: str) -> None:
    change, told = FLAWS[flaw]
    saved(tmp_path, "mixtral", change)
    with pytest.raises(ModelError, match=told):
        weights_in(tmp_path, model_in(tmp_path))
