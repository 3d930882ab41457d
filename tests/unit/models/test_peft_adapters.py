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
