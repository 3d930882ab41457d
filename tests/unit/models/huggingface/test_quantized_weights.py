"""Published weights in 4 and 8 bits: read as transformers reads them, and refused where plait cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parity import huggingface_cases as cases
from plait.errors import ModelError
from plait.models.huggingface.pretrained import model_in, sizes_in, weights_in

pytestmark = pytest.mark.transformers

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}


def saved(name: str, folder: Path, **sizes: Any) -> dict[str, Tensor]:
    """The tensors of a model that is saved in `folder`."""
    cases.drawn(lambda: getattr(cases, name)(**sizes)).float().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> None:
    save_file({key: one.contiguous() for key, one in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> dict[str, Tensor]:
    """The weights in `folder` by their names in transformers."""
    model = model_in(folder)
    weights, names = weights_in(folder, model), model.huggingface_names
    assert weights is not None
    return {names[name]: one[...] for name, one in weights.items()}  # type: ignore[index]


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = saved("gpt_oss", tmp_path, hidden_size=64, intermediate_size=32)
    expected, generator = dict(tensors), torch.Generator().manual_seed(5)
    for key in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
        experts, inputs, outputs = tensors.pop(key).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = convert_moe_packed_tensors(blocks, scales)
    rewrite(tmp_path, tensors, MXFP4)
    assert sizes_in(tmp_path)["hidden"] == 64
    found = read(tmp_path)
    assert found.keys() == expected.keys()
    for key, one in found.items():
        assert one.dtype == expected[key].dtype
        assert torch.equal(one, expected[key]), key


def test_weights_in_fp8_are_multiplied_by_the_factors_of_their_blocks(tmp_path: Path) -> None:
    tensors = saved("deepseek_v3", tmp_path, hidden_size=24)
    expected, generator = dict(tensors), torch.Generator().manual_seed(5)
    kinds = ("_proj.weight", "_mqa.weight")
    for key in [key for key in tensors if key.endswith(kinds)]:
        rows, columns = tensors[key].shape
        numbers = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        factors = torch.rand(-(-rows // 8), -(-columns // 16), generator=generator)
        tensors |= {key: numbers, f"{key}_scale_inv": factors}
        whole = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                whole[row, column] = float(numbers[row, column]) * float(factors[row // 8, column // 16])
        expected[key] = whole
    assert any(tensors[key].shape[0] % 8 for key in tensors if key.endswith(kinds)), "a smaller last block"
    rewrite(tmp_path, tensors, FP8)
    found = read(tmp_path)
    for key, one in found.items():
        if key in expected:
            assert torch.equal(one, expected[key]), key
    experts = found["model.layers.1.mlp.experts.gate_up_proj"][2]
    path = "model.layers.1.mlp.experts.2"
    joined = torch.cat([expected[f"{path}.{one}_proj.weight"] for one in ("gate", "up")])
    assert torch.equal(experts, joined)


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "gptq", "bits": 4}, {**FP8, "weight_block_size": None}, {"quant_method": None}],
)
def test_other_quantizations_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any]) -> None:
    rewrite(tmp_path, saved("gpt_oss", tmp_path), quantization)
    with pytest.raises(ModelError, match=r"quant_method = .*, and plait reads mxfp4 and fp8 with"):
        model_in(tmp_path)


def test_factors_without_a_configuration_are_refused(tmp_path: Path) -> None:
    tensors = saved("deepseek_v3", tmp_path)
    key = "model.layers.0.self_attn.o_proj.weight"
    narrow = {key: tensors[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(3, 2)}
    rewrite(tmp_path, tensors | narrow, None)
    with pytest.raises(ModelError, match=r"o_proj.weight holds F8_E4M3; .*_scale_inv is unexpected"):
        weights_in(tmp_path, model_in(tmp_path))


def test_layers_for_further_tokens_are_refused_by_name(tmp_path: Path) -> None:
    tensors = saved("deepseek_v3", tmp_path)
    further = {"model.layers.2.eh_proj.weight": torch.ones(24, 48)}
    rewrite(tmp_path, tensors | further, None)
    reason = (
        r"layers behind the 2 of config.json, such as model.layers.2.eh_proj.weight, which predict further"
    )
    with pytest.raises(ModelError, match=reason):
        weights_in(tmp_path, model_in(tmp_path))
