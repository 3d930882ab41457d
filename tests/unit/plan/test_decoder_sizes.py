"""Parameters and operations of a decoder beside their formulas, at sizes where each term counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import plait
from plait.app.config.model_section import ModelConfig
from plait.app.loop.meter import flops_per_token
from plait.errors import ModelError
from plait.estimate.prediction.traced_model import TracedModel
from plait.models.layers.layer_sequence import layer_costs, sequence_of
from plait.plan.decoder_sizes import Decoder, LayerKind, decoder_of

LLAMA = Decoder(
    layers=3, hidden=96, heads=6, kv_heads=2, inner=176, vocab=500, context=640, gated=True, rotary=True
)
SIZES = {"layers": 3, "hidden": 96, "heads": 4, "vocab": 500, "context": 64}
SPARSE = replace(LLAMA, experts=8, top_k=3, shared=40)
GPT = Decoder(layers=3, hidden=96, heads=6, vocab=500, context=640, biases=True, positions=True)


def test_operations_are_six_for_each_element_of_a_matrix_and_twelve_for_each_position() -> None:
    for decoder in [LLAMA, GPT]:
        keys = 32 if decoder is LLAMA else 96
        width, matrices = (176, 3) if decoder is LLAMA else (4 * 96, 2)
        attention, mlp = 2 * 96 * 96 + 2 * 96 * keys, matrices * 96 * width
        per_token = 3 * (6 * (attention + mlp) + 12 * 640 * 96) + 6 * 96 * 500
        assert decoder.operations_per_token == per_token
        assert decoder.layer_costs == (1, *((attention + 2 * 640 * 96, 1 + mlp) * 3), 1 + 96 * 500)


def test_parameters_of_a_rank_are_its_part_of_the_matrices_and_all_of_the_norms() -> None:
    for decoder, tp, expected in [
        (LLAMA, 2, {"attention": 2 * 96 * (96 + 32) / 2 + 96, "mlp": 3 * 96 * 176 / 2 + 96}),
        # Four ranks: each has half a head's keys and values more than the model.
        (LLAMA, 4, {"attention": 2 * 96 * (96 + 64) / 4 + 96, "head": 96 * 500 / 4 + 96}),
        (LLAMA, 8, {"attention": 2 * 96 * (96 + 96) / 8 + 96, "embedding": 96 * 500 / 8}),
        (GPT, 2, {"attention": 4 * 96 * 96 / 2 + 3 * 96 / 2 + 96 + 2 * 96}),
        (GPT, 2, {"mlp": 2 * 96 * 384 / 2 + 384 / 2 + 96 + 2 * 96}),
        (GPT, 2, {"embedding": 96 * 500 / 2 + 640 * 96, "head": 96 * 500 / 2 + 2 * 96}),
    ]:
        assert {kind: decoder.parameters(kind, tp) for kind in expected} == expected


def test_a_tied_table_counts_once_where_both_layers_are() -> None:
    tied = replace(LLAMA, tied=True)
    both: tuple[LayerKind, ...] = ("embedding", "mlp", "mlp", "head")
    for kinds, shared in ((both, 96 * 500 / 2), (both[1:], 0), (both[:-1], 0)):
        each = sum(tied.parameters(kind, 2) for kind in kinds)
        assert tied.parameters_of(kinds, 2) == each - shared == LLAMA.parameters_of(kinds, 2) - shared
    assert tied.total_parameters == tied.parameters_of(tied.kinds)


def test_a_block_is_two_layers() -> None:
    assert LLAMA.kinds == ("embedding", *(("attention", "mlp") * 3), "head")


def test_sizes_that_fit_no_model_are_refused() -> None:
    for fields, message in [
        ({"layers": 0}, "model.layers is 0: give a whole number of at least 1"),
        ({"vocab": True}, "model.vocab is True"),
        ({"context": 8.0}, "model.context is 8.0"),
        ({"inner": 0}, "model.inner is 0"),
        ({"hidden": None}, "model.hidden is None"),
        ({"kv_heads": 3, "heads": 4}, "model.kv_heads = 3 does not divide model.heads = 4"),
        ({"heads": 7}, "model.hidden = 96 is not divisible by model.heads = 7: set model.hidden to 91 or 98"),
        ({"heads": 32, "kv_heads": 1}, "makes heads of 3 features, and llama turns pairs of them"),
        ({"experts": 0}, "model.experts is 0"),
        ({"experts": 4, "top_k": 0}, "model.top_k is 0"),
        ({"experts": 4, "top_k": 5}, "model.top_k = 5 is more than model.experts = 4: set model.top_k to at"),
        ({"experts": 4, "shared": -1}, "model.shared is -1: give a whole number of at least 0"),
        ({"shared": 4}, "model.shared = 4 is the width of shared experts, but model.experts is none"),
        ({"experts": 4, "gated": False}, "model.experts = 4 is a number of gated MLPs, which only llama has"),
    ]:
        with pytest.raises(ModelError, match=message):
            replace(LLAMA, **fields)  # type: ignore[arg-type]
        assert replace(LLAMA, heads=1, kv_heads=1, layers=1, vocab=1, context=1, inner=1).head_size == 96


def test_a_token_meets_its_own_experts_the_router_and_those_that_are_shared() -> None:
    expert, router, shared = 3 * 96 * 176, 96 * 8, 3 * 96 * 40
    assert SPARSE.layer_costs[2] == 1 + router + 3 * expert + shared
    assert SPARSE.parameters("mlp") == router + 8 * expert + shared + 96
    blocks = 3 * 6 * (router + 2 * expert + shared)
    assert SPARSE.operations_per_token - LLAMA.operations_per_token == blocks


def test_a_sparse_llama_has_the_parameters_operations_and_costs_of_its_sizes() -> None:
    more = {"kv_heads": 2, "inner": 40, "experts": 6, "top_k": 2, "shared": 24}
    model = plait.models.llama(**SIZES, **more)
    sizes = ModelConfig(name="llama", **{**SIZES, "vocab": None}, **more).decoder(500)  # type: ignore[arg-type]
    assert decoder_of(model) is None
    assert sizes.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.operations_per_token == flops_per_token(model, layers=3, hidden=96, context=64)
    assert [*sizes.layer_costs] == layer_costs(sequence_of(model).layers)
    prediction = plait.predict(sizes, plait.Plan(), "h100-sxm", rows=1)
    assert isinstance(prediction.model, TracedModel)
    assert prediction.model.operations_per_token == pytest.approx(sizes.operations_per_token, rel=1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sizes_give_parameters_operations_and_costs_of_layers(name: str, tied: bool) -> None:
    more = {"kv_heads": 2, "inner": 200} if name == "llama" else {}
    model = getattr(plait.models, name)(tied=tied, **SIZES, **more)
    found, flags = decoder_of(model), dict.fromkeys(("biases", "positions"), True)
    if name == "llama":
        flags = dict.fromkeys(("gated", "rotary"), True)
    assert found == Decoder(**{"kv_heads": 4, "inner": 384, **SIZES, **more, **flags, "tied": tied})  # type: ignore[arg-type]
    configured = ModelConfig(name=name, tied=tied, **{**SIZES, "vocab": None}, **more).decoder(500)  # type: ignore[arg-type]
    assert replace(configured, kv_heads=configured.key_heads, inner=configured.inside) == found
    assert found.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.operations_per_token == flops_per_token(model, layers=3, hidden=96, context=64)
    assert [*found.layer_costs] == layer_costs(sequence_of(model).layers)
    assert decoder_of(found) is found


def test_sizes_do_not_describe_another_model_one_whose_blocks_differ_and_one_that_trains_in_part() -> None:
    model = plait.models.llama(**SIZES)
    other = plait.models.llama(**{**SIZES, "layers": 1}, inner=128)
    blocks = [*model.get_submodule("blocks"), *other.get_submodule("blocks")]  # type: ignore[misc]
    model.blocks = nn.Sequential(*blocks)
    frozen = plait.models.gpt2(**SIZES)
    frozen.blocks[1].mlp.up.bias.requires_grad_(False)
    adapted = plait.lora(plait.models.gpt2(**SIZES), rank=2)
    assert [decoder_of(one) for one in (model, {}, frozen, adapted)] == [None] * 4


def test_ranks_share_whole_heads_and_equal_parts_of_the_width_of_an_mlp() -> None:
    sizes = Decoder(layers=1, hidden=96, heads=12, kv_heads=4, inner=88, vocab=7, context=8)
    shared = {1: None, 2: None, 4: None, 8: "heads", 5: "heads", 6: "kv_heads", 3: "kv_heads", 24: "heads"}
    assert {tp: sizes.undivided_by(tp) for tp in shared} == shared
    assert replace(sizes, kv_heads=2, inner=90).undivided_by(4) == "inner"
    assert replace(sizes, kv_heads=2).undivided_by(4) is None
    sparse = replace(sizes, gated=True, experts=3, inner=7)
    assert sparse.undivided_by(2) is None
    assert replace(sparse, shared=8).undivided_by(2) is None
    assert replace(sparse, shared=7).undivided_by(2) == "shared"
