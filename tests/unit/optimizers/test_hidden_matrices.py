"""Which parameters are hidden matrices, and into which matrices joined ones are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity import huggingface_cases as cases
from plait.errors import PlanError
from plait.models.layers.layer_sequence import sequence_of
from plait.optimizers.hidden_matrices import ParameterMatrices, listed_matrices, parameter_matrices
from plait.rules import column

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 20, "context": 8}


def found_in(model: nn.Module, **options: bool) -> dict[str, ParameterMatrices]:
    return parameter_matrices(sequence_of(model), getattr(model, "rules", {}), **options)


def reasons(model: nn.Module, **options: bool) -> dict[str, str]:
    """Why AdamW updates parameters, of one block."""
    found = found_in(model, **options)
    return {name: one.reason for name, one in found.items() if not one.parts and "blocks.1" not in name}


def shapes(one: ParameterMatrices) -> list[tuple[int, int]]:
    return [shape for part in one.parts for shape in part.shapes]


def test_weights_of_linears_in_blocks_are_hidden_matrices_and_the_rest_is_adamws() -> None:
    found = found_in(plait.models.gpt2(**SIZES))
    assert shapes(found["blocks.0.attention.query.weight"]) == [(16, 16)]
    assert shapes(found["blocks.1.mlp.up.weight"]) == [(64, 16)]
    of_adamw = reasons(plait.models.gpt2(**SIZES))
    assert {name: why for name, why in of_adamw.items() if why != "a vector"} == {
        "embedding.token.weight": "an embedding",
        "embedding.position.weight": "an embedding",
    }
    assert of_adamw["blocks.0.mlp.up.bias"] == of_adamw["head.norm.weight"] == "a vector"
    assert reasons(plait.models.gpt2(**SIZES, tied=False))["head.output.weight"] == "the output layer"


def test_experts_are_matrices_and_routers_are_when_asked() -> None:
    model = plait.models.llama(**SIZES, kv_heads=2, inner=12, experts=3, shared=10)
    found = found_in(model)
    within = "blocks.0.mlp.mixture"
    assert shapes(found[f"{within}.experts.gate_up_proj"]) == [(12, 16)] * 6
    assert [part.box.offsets for part in found[f"{within}.experts.gate_up_proj"].parts[1:3]] == [
        (0, 12, 0),
        (1, 0, 0),
    ]
    assert shapes(found[f"{within}.experts.down_proj"]) == [(16, 12)] * 3
    assert shapes(found[f"{within}.shared.gate_up.weight"]) == [(10, 16)] * 2
    assert found[f"{within}.router.weight"].reason == "a router"
    assert shapes(found_in(model, routers=True)[f"{within}.router.weight"]) == [(3, 16)]


def test_heads_of_queries_keys_and_values_are_matrices_when_asked_and_those_of_outputs_never() -> None:
    found = found_in(plait.models.llama(**SIZES, kv_heads=2, inner=12), per_head=True)
    assert shapes(found["blocks.0.attention.query.weight"]) == [(4, 16)] * 4
    assert shapes(found["blocks.0.attention.value.weight"]) == [(4, 16)] * 2
    assert shapes(found["blocks.0.attention.output.weight"]) == [(16, 16)]
    assert shapes(found["blocks.0.mlp.up.weight"]) == [(12, 16)]


def test_factors_of_lora_are_adamws_and_frozen_parameters_nobodys() -> None:
    model = plait.lora(plait.models.llama(**SIZES, inner=12, experts=3), rank=2, alpha=4)
    found = found_in(model)
    assert {one.reason for one in found.values()} == {"a factor of LoRA"}
    assert not any("base" in name for name in found)


def test_attention_of_torch_joins_three_and_other_modules_have_no_matrices() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    narrow = nn.Linear(8, 1, bias=False)
    model = nn.Sequential(nn.Conv1d(8, 8, 3), layer, narrow, nn.Bilinear(8, 8, 8), nn.Linear(8, 3))
    found = found_in(model)
    assert shapes(found["1.self_attn.in_proj_weight"]) == [(8, 8)] * 3
    assert shapes(found_in(model, per_head=True)["1.self_attn.in_proj_weight"]) == [(4, 8)] * 6
    assert shapes(found["1.self_attn.out_proj.weight"]) == [(8, 8)]
    assert shapes(found["1.linear2.weight"]) == [(8, 12)]
    others = {name: one.reason for name, one in found.items() if one.reason not in ("", "a vector")}
    assert others == {
        "0.weight": "no weight of a linear",
        "2.weight": "a single row or column",
        "3.weight": "no weight of a linear",
        "4.weight": "the output layer",
    }


@pytest.mark.transformers
def test_matrices_of_transformers_families_are_those_of_their_declarations() -> None:
    hidden = "blocks.0.attention"
    phi3 = found_in(plait.models.from_huggingface(cases.phi3()))
    assert shapes(phi3[f"{hidden}.self_attn.qkv_proj.weight"]) == [(24, 24), (12, 24), (12, 24)]
    assert shapes(phi3["blocks.0.mlp.mlp.gate_up_proj.weight"]) == [(20, 24)] * 2
    heads = found_in(plait.models.from_huggingface(cases.phi3()), per_head=True)
    assert shapes(heads[f"{hidden}.self_attn.qkv_proj.weight"]) == [(6, 24)] * 8

    gpt2 = found_in(plait.models.from_huggingface(cases.gpt2()))
    assert shapes(gpt2[f"{hidden}.attn.c_attn.weight"]) == [(24, 24)] * 3
    assert [part.box.offsets for part in gpt2[f"{hidden}.attn.c_attn.weight"].parts] == [
        (0, 0),
        (0, 24),
        (0, 48),
    ]
    assert shapes(gpt2["blocks.0.mlp.mlp.c_fc.weight"]) == [(96, 24)]
    assert gpt2["blocks.0.mlp.mlp.c_fc.weight"].parts[0].box.sizes == (24, 96)

    mixture = found_in(plait.models.from_huggingface(cases.qwen2_moe()))
    assert mixture["blocks.0.mlp.mlp.shared_expert_gate.weight"].reason == "a single row or column"
    assert mixture["blocks.0.mlp.mlp.gate.weight"].reason == "a router"


@pytest.mark.transformers
def test_rows_that_alternate_in_transformers_families_are_told_apart() -> None:
    neox = plait.models.from_huggingface(cases.gpt_neox())
    weight = neox.get_parameter("blocks.0.attention.query_key_value.weight").detach()
    [part] = found_in(neox)["blocks.0.attention.query_key_value.weight"].parts
    by_head = weight.view(4, 3, 12, 48)
    assert all(one.equal(by_head[:, number].reshape(48, 48)) for number, one in enumerate(part.split(weight)))
    assert len(found_in(neox, per_head=True)["blocks.0.attention.query_key_value.weight"].parts) == 4

    gpt_oss = plait.models.from_huggingface(cases.gpt_oss())
    weight = gpt_oss.get_parameter("blocks.0.mlp.mlp.experts.gate_up_proj").detach()
    part = found_in(gpt_oss)["blocks.0.mlp.mlp.experts.gate_up_proj"].parts[3]
    gate, up = part.split(weight[part.box.slices])
    assert torch.equal(gate, weight[3, :, ::2].mT)
    assert torch.equal(up, weight[3, :, 1::2].mT)

    latent = plait.models.from_huggingface(cases.deepseek_v3())
    weight = latent.get_parameter("blocks.0.attention.self_attn.kv_b_proj.weight").detach()
    [part] = found_in(latent)["blocks.0.attention.self_attn.kv_b_proj.weight"].parts
    keys, values = part.split(weight)
    assert torch.equal(keys, weight.view(4, 14, 6)[:, :6].reshape(24, 6))
    assert torch.equal(values, weight.view(4, 14, 6)[:, 6:].reshape(32, 6))


def test_a_declaration_that_does_not_divide_the_rows_is_refused() -> None:
    model = plait.models.gpt2(**SIZES)
    rules = {"blocks.*.attention.query": column.by("heads").interleave("heads", "head_size")}
    with pytest.raises(PlanError, match="does not divide the 4 rows of each of its parts"):
        parameter_matrices(sequence_of(model), rules)


def test_the_listing_has_a_line_for_parameters_that_differ_in_the_number_of_their_layer() -> None:
    lines = listed_matrices(found_in(plait.models.gpt2(**SIZES)))
    assert "blocks.*.mlp.up.weight            2 ×  Muon   1 of 64 × 16" in lines
    assert "embedding.token.weight                 AdamW  an embedding 20 × 16" in lines
    assert len(lines) == 20
