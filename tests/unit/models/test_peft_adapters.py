"""Folders of peft that plait refuses; what it reads and writes is in `parity/test_peft.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import plait
from parity.norm import assert_equal
from plait.errors import ModelError
from plait.models.peft_files import CONFIG, WEIGHTS, load_adapter, save_adapter
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router


def model(inner: int = 6) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, inner), nn.Tanh(), nn.Linear(inner, 3), nn.Linear(3, 2))


def learnt() -> nn.Sequential:
    """The model with adapters of other values than they begin with."""
    adapted = plait.lora(model(), rank=2, alpha=3.0, dropout=0.25)
    for number, parameter in enumerate(one for one in adapted.parameters() if one.requires_grad):
        parameter.data += number + 1
    return adapted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(learnt(), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_model_with_values_gets_those_of_the_adapter(folder: Path) -> None:
    expected, found = learnt(), model()
    values = load_adapter(found, folder)
    assert_equal(dict(found.state_dict()), dict(expected.state_dict()), 0.0, "the value")
    assert values.keys() == {f"{path}.{half}.weight" for path in "02" for half in ("down", "up")}
    assert repr(found[0]) == repr(expected[0])
    assert "4, 6, rank=2, alpha=3" in repr(found[0])
    assert found[0].dropout.p == 0.25
    assert [name for name, one in found.named_parameters() if one.requires_grad] == [*values]
    with pytest.raises(ModelError, match="has adapters already: give load_adapter a model without any"):
        load_adapter(found, folder)


def rename(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["base_model.model.1.lora_A.weight"] = tensors.pop("base_model.model.0.lora_A.weight")
    save_file(tensors, folder / WEIGHTS)


def remove(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["base_model.model.0.lora_A.weight"]
    save_file(tensors, folder / WEIGHTS)


def configure(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (rename, "has base_model.model.1.lora_A.weight, which is no adapter of a linear of the model"),
        (remove, r"do not fit \(0.down.weight is missing\): give those of this model"),
        (configure(r=3), r"has r = 3, and adapter_model.* has 0.down.weight as \[2, 4\]: give another"),
        (configure(r=2**31), r"has r = 2147483648, and adapter_model.* has 0.down.weight as \[2, 4\]"),
        (configure(r="2"), r"adapter_config.json: the rank of an adapter"),
        (configure(lora_dropout=1.5), r"adapter_config.json: an adapter has dropout = 1.5"),
        (configure(use_dora=True), "has use_dora = True, which plait's adapters have not"),
        (configure(rank_pattern={"0": 4}), "has rank_pattern = "),
        *(
            (
                configure(**{key: value}),
                f"has {key} = .*{re.escape(str(value))}.*, which plait's adapters have not: {remedy}",
            )
            for key, value, remedy in (
                ("init_lora_weights", "pissa_niter_4", "it changes the base's weights"),
                ("init_lora_weights", "OLoRA", "it changes the base's weights"),
                ("init_lora_weights", "mica", "train with init_lora_weights = True"),
                ("bias", "lora_only", "train with bias = none"),
                ("peft_type", "IA3", "train with peft_type = lora"),
                ("modules_to_save", ["2"], "train without it"),
                ("trainable_token_indices", [1], "train without it"),
                ("a_setting_of_next_year", 1, "train without it"),
            )
        ),
        (configure(lora_alpha=None), "adapter_config.json: the alpha of an adapter"),
        (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json: give a folder of peft"),
    ],
)
def test_a_malformed_peft_folder_is_refused(folder: Path, change: Callable[[Path], None], text: str) -> None:
    change(folder)
    with pytest.raises(ModelError, match=text):
        load_adapter(model(), folder)


def test_settings_without_effect_are_accepted(folder: Path) -> None:
    configure(
        init_lora_weights="Gaussian", layers_to_transform=[1], use_qalora=False, a_setting_of_next_year=None
    )(folder)
    assert load_adapter(model(), folder)


class Sparse(nn.Module):
    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router, self.experts = Router(4, experts, 2), Experts(4, 6, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, indices = self.router(x)
        return self.experts(x, indices, weights)  # type: ignore[no-any-return]


MATRICES = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize("targets", [("1.experts.gate_up_proj",), ("2.experts.down_proj", "0"), MATRICES])
def test_adapters_of_experts_are_read_as_they_were_written(tmp_path: Path, targets: tuple[str, ...]) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), Sparse(), Sparse(4), nn.Linear(4, 2))

    adapted, found = plait.lora(made(), rank=2, targets=targets), made()
    for parameter in adapted.parameters():
        nn.init.normal_(parameter)
    save_adapter(adapted, tmp_path)
    values = load_adapter(found, tmp_path)
    trained = {name: one.detach() for name, one in adapted.named_parameters() if one.requires_grad}
    assert_equal(values, trained, 0.0, "the value")
    assert_equal({name: found.get_parameter(name).detach() for name in values}, trained, 0.0, "the value")
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_modules"] == [one for one in targets if one == "0"]


def without_the_first(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({key: one for key, one in tensors.items() if "base_layer" not in key}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "experts", "text"),
    [
        (
            lambda _: None,
            0,
            r"has target_parameters with '0.experts.down_proj', an adapter of experts, and the",
        ),
        (lambda _: None, 5, r"has r = 2, and .* has 0.experts.gate_up_proj_adapter.down as \[6, 4\]"),
        (
            configure(target_parameters=["experts.down_proj"]),
            3,
            "has base_model.*base_layer.*, which is no ada",
        ),
        (configure(target_parameters=["router.weight"]), 3, "target_parameters with 'router.weight'"),
        (configure(lora_dropout=0.1), 3, "is added to a weight of experts, and cannot have dropout = 0.1"),
        (
            without_the_first,
            3,
            r"target_parameters for 0.experts.gate_up_proj, and adapter_model.* has no ada",
        ),
    ],
)
def test_adapters_of_other_experts_are_refused(
    tmp_path: Path, change: Callable[[Path], None], experts: int, text: str
) -> None:
    save_adapter(plait.lora(nn.Sequential(Sparse(), nn.Linear(4, 2)), rank=2, targets=MATRICES), tmp_path)
    change(tmp_path)
    first = Sparse(experts) if experts else nn.Linear(4, 4)
    with pytest.raises(ModelError, match=text):
        load_adapter(nn.Sequential(first, nn.Linear(4, 2)), tmp_path)


def test_saving_an_adapter_refuses_what_a_peft_folder_cannot_hold(tmp_path: Path) -> None:
    adapted = plait.lora(model(), rank=2)
    adapted[3].requires_grad_(True)
    with pytest.raises(ModelError, match=r"^3.weight, 3.bias train beside the adapters, and plait writes"):
        save_adapter(adapted, tmp_path)
    adapted = plait.lora(model(), rank=2)
    adapted[2].alpha = 8
    with pytest.raises(
        ModelError, match=r"adapters of 0 and 2 differ in rank, alpha or dropout \(\(2, 16, 0.0"
    ):
        save_adapter(adapted, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_model_without_adapters_has_none_to_save(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no adapters to save"):
        save_adapter(model(), tmp_path)
