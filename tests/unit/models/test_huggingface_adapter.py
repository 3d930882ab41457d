"""What `from_huggingface` does to models of transformers: names, first values, refusals, attention."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import plait
from parity import huggingface_cases as cases
from parity.kernels import Kernels
from plait.app.loop.meter import flops_per_token
from plait.engine.tensor_sources import locate_tensors
from plait.errors import ModelError, PlanError
from plait.models.huggingface.common import Rotary
from plait.models.initial_values import initial_value
from plait.models.layers.layer_sequence import bits_of, layer_costs, sequence_of
from plait.models.result_cache import ResultCache
from plait.plan.plan import Plan
from plait.ranks.group import Group, Traffic
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.parallel.tensor_parallelism import named
from plait.tensor.running_sequence import ContextParallelism, running

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("name", cases.MODELS)
def test_the_layers_hold_the_models_own_parameters(name: str) -> None:
    model = cases.MODELS[name]()
    before = {key: bits_of(value) for key, value in model.state_dict().items()}
    config = model.config.to_dict()
    sequence = plait.models.from_huggingface(model)
    theirs, ours = (one.state_dict(keep_vars=True) for one in (model, sequence))
    names: Any = sequence.huggingface_names
    assert names.keys() == ours.keys()
    assert sorted(names.values()) == sorted(theirs)
    assert all(ours[key] is theirs[other] for key, other in names.items())
    assert {key: bits_of(value) for key, value in model.state_dict().items()} == before
    assert model.config.to_dict() == config
    assert sequence.context == cases.GPT2_CONTEXT
    heads = model.config.num_attention_heads
    width = heads * (getattr(model.config, "head_dim", None) or model.config.hidden_size // heads)
    layers = sequence_of(sequence).layers
    costs = [one for one in layers if hasattr(one.module, "cost")]
    assert len(costs) >= model.config.num_hidden_layers
    for layer, cost in zip(costs, layer_costs(costs), strict=True):
        matrices = sum(one.numel() for one in layer.module.parameters() if one.dim() > 1)
        seen = min(cases.GPT2_CONTEXT, getattr(layer.module, "window", None) or cases.GPT2_CONTEXT)
        attn: Any = getattr(layer.module, "self_attn", None)
        if hasattr(attn, "kv_b_proj"):  # scores and weighted values have widths of their own
            width = heads * (attn.qk_head_dim + attn.v_head_dim) / 2
        assert cost == matrices + 2 * seen * width, layer.path


def test_layers_of_a_transformers_model_have_readable_names() -> None:
    names: Any = plait.models.from_huggingface(cases.gpt2()).huggingface_names
    assert names["blocks.1.attention.attn.c_attn.weight"] == "transformer.h.1.attn.c_attn.weight"
    assert names["embedding.wte.weight"] == "transformer.wte.weight"
    assert names["head.lm_head.weight"] == "lm_head.weight"


@pytest.mark.parametrize("name", cases.MODELS)
def test_a_model_on_meta_begins_as_transformers_would_begin(name: str) -> None:
    real = cases.MODELS[name]()
    with torch.device("meta"):
        model = cases.MODELS[name]()
    sequence = plait.models.from_huggingface(model)
    places = locate_tensors(named(sequence_of(sequence).layers))
    names: Any = sequence.huggingface_names
    theirs = dict(real.named_parameters(remove_duplicate=False))
    for key, place in places.items():
        value = initial_value(place.layer, place.path, place.name, 7)
        if key in names and place.is_buffer:
            assert not value.any(), "a correction of experts' scores"
        elif place.is_buffer:
            rotary = base_model(real).rotary_emb
            known = [one for key, one in rotary.named_buffers() if "original" not in key]
            assert any(torch.equal(value.view(torch.float32), one) for one in known)
        else:
            other = theirs[names[key]].detach()
            assert value.shape == other.shape
            few = 5 * 0.02 * (2 / other.numel()) ** 0.5  # five deviations of a mean of so many values
            assert float(value.mean()) == pytest.approx(float(other.mean()), abs=max(0.01, few))
            assert (float(value.std()) == 0) == (float(other.std()) == 0), key
            if other.numel() >= 64:
                assert float(value.std()) == pytest.approx(float(other.std()), abs=0.006)
    spreads = [
        float(initial_value(p.layer, p.path, p.name, 7).std()) for k, p in places.items() if "c_proj.w" in k
    ]
    assert all(spread == pytest.approx(0.01, rel=0.2) for spread in spreads)


def base_model(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def test_a_plans_precision_does_not_round_the_angles() -> None:
    model: Any = cases.llama()
    one, rounded = Rotary(model.model.rotary_emb), Rotary(model.model.rotary_emb).bfloat16()
    like = torch.zeros(1, 8, 24, dtype=torch.float64)
    for angles, others in zip(one(like), rounded(like), strict=True):
        assert torch.equal(angles, others)
    before = one.bits.clone()
    model.model.rotary_emb.inv_freq += 1
    assert torch.equal(one.bits, before), "of its own"
    one.require_all_features(2 * len(before))
    with pytest.raises(
        ModelError, match=rf"rotates {2 * len(before)} of a head's {2 * len(before) + 2} features"
    ):
        one.require_all_features(2 * len(before) + 2)


@pytest.mark.parametrize("make", [cases.llama, cases.gpt_neox])
def test_angles_are_computed_once_for_all_layers(make: Any) -> None:
    model, tokens = plait.models.from_huggingface(make()), torch.arange(8).view(2, 4)
    with Kernels() as kernels:
        output = model(tokens)
    assert kernels.names["cos"] == kernels.names["sin"] == 1
    with patch.object(ResultCache, "get", lambda self, key, like, compute: compute()), Kernels() as kernels:
        assert torch.equal(model(tokens), output)
    assert kernels.names["cos"] > 1


def test_angles_are_those_of_a_ranks_positions() -> None:
    """Of rank 1 of 2; the second micro-batch takes those of the first, unless it is packed."""
    model: Any = cases.llama()
    rotary, like = Rotary(model.model.rotary_emb), torch.zeros(2, 5, 24, dtype=torch.float64)
    every = Rotary(model.model.rotary_emb)(torch.zeros(2, 10, 24, dtype=torch.float64))
    parallelism = ContextParallelism(Group("cp", (0, 1), 1, None, Traffic(), 1.0), "striped")
    for computed in (1, 0):
        with Kernels() as kernels, running(parallelism.sequence(10)):
            angles = rotary(like)
        assert kernels.names["cos"] == computed
        assert all(torch.equal(one, whole[1::2]) for one, whole in zip(angles, every, strict=True))
    bounds = document_bounds(torch.tensor([[0] * 3 + [1] * 7, [0] * 10]))
    with Kernels() as kernels, running(parallelism.sequence(10, bounds)):
        for angles in (rotary(like), rotary(like)):
            for one, whole in zip(angles, every, strict=True):
                assert torch.equal(one, torch.stack([whole[[1, 0, 2, 4, 6]], whole[1::2]])[:, None])
    assert kernels.names["cos"] == 1


def test_a_sequence_beyond_the_context_is_refused() -> None:
    for make in (cases.gpt2, cases.llama, cases.gpt_neox):
        with pytest.raises(ModelError, match="longer than the model's context of 8"):
            plait.models.from_huggingface(make())(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: cases.gpt2(attn_pdrop=0.1), "blocks.0.attention.attn.attn_dropout"),
        (lambda: cases.llama(attention_dropout=0.1), "blocks.0.attention.attention_dropout"),
        (lambda: cases.gpt_neox(attention_dropout=0.1), "blocks.0.attention_dropout"),
    ],
)
def test_dropout_of_attention_is_a_module_in_the_mode_of_the_model(make: Any, path: str) -> None:
    for training in (True, False):
        module = plait.models.from_huggingface(make().train(training)).get_submodule(path)
        assert type(module) is nn.Dropout
        assert (module.p, module.training) == (0.1, training)


def test_memory_of_a_transformers_model_is_predicted_for_tp() -> None:
    model = plait.models.from_huggingface(cases.gpt2())
    plans = [plait.Plan(tp=tp, microbatches=2, precision="fp32") for tp in (1, 2)]
    whole, cut = (plait.memory(model, plan, rows=4) for plan in plans)
    assert whole.has_activations
    assert whole.peak > cut.peak > whole.peak / 2


def test_operations_are_counted_as_for_plaits_own_model() -> None:
    sizes = {"layers": 2, "hidden": 24, "context": 8}
    theirs = plait.models.from_huggingface(cases.gpt2())
    ours = plait.models.gpt2(**sizes, heads=4, vocab=cases.GPT2_VOCAB)
    assert flops_per_token(theirs, **sizes) == flops_per_token(ours, **sizes)
    costs, own = layer_costs(sequence_of(theirs).layers), layer_costs(sequence_of(ours).layers)
    assert costs[1:] == own[1:]


@pytest.mark.parametrize("fields", [{"pp": 2, "microbatches": 2}, {"tp": 2}], ids=str)
def test_a_model_that_was_not_made_into_layers_is_told_how(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"give (parallelize )?plait\.models\.from_huggingface\(model\)"):
        plait.memory(cases.MODELS["gpt2"](), Plan(**fields), device="cpu")
