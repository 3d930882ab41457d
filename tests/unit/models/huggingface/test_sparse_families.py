"""Sparse MLPs of transformers as layers of plait: what they hold and cost, their rules, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity import huggingface_cases as cases
from plait.errors import ModelError
from plait.models.huggingface.mixture import SparseMLP
from plait.models.layers.layer_sequence import layer_costs
from plait.plan.rules import column, entrance, row
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router
from plait.tensor.named_layer import NamedLayer

pytestmark = pytest.mark.transformers

Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def own_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations of the test's own, which it may change."""
    monkeypatch.setattr(cases, "_CONFIGURATIONS", {})


def kinds(model: nn.Sequential) -> list[str]:
    return [type(block.mlp).__name__ for block in model.blocks]


@pytest.mark.parametrize("name", cases.SPARSE)
def test_a_sparse_layer_has_the_router_and_experts_of_plait(name: str) -> None:
    theirs: Any = cases.SPARSE[name]()
    layers: Any = plait.models.from_huggingface(theirs)
    sparse = [layer for layer in layers.modules() if isinstance(layer, SparseMLP)]
    assert len(sparse) == 2 - name.endswith("partly-dense") - name.startswith("deepseek")
    for layer in sparse:
        mixture = layer.mlp
        assert type(mixture.get_submodule("router" if name.startswith("gpt-oss") else "gate")) is Router
        assert type(mixture.experts) is Experts
        assert (mixture.shared_name is not None) == name.startswith(("qwen2", "deepseek"))
        config = theirs.config
        assert mixture.top_k == config.num_experts_per_tok
        expert = 3 * mixture.experts.down_proj[0].numel()
        matrices = [(name, p.numel()) for name, p in layer.named_parameters() if p.dim() == 2]
        others = sum(count for name, count in matrices if ".experts." not in name)
        assert layer_costs([NamedLayer("", layer)]) == [1 + others + config.num_experts_per_tok * expert]


def test_dense_layers_among_sparse_ones_are_partitioned_as_in_dense_models() -> None:
    first_dense: Any = plait.models.from_huggingface(cases.SPARSE["qwen3-moe-partly-dense"]())
    assert kinds(first_dense) == ["MLP", "SparseMLP"]
    rules = {path: rule for path, rule in first_dense.rules.items() if ".mlp." in path}
    assert rules == {
        "blocks.0.mlp.post_attention_layernorm": entrance,
        "blocks.*.mlp.mlp.gate_proj": column,
        "blocks.*.mlp.mlp.up_proj": column,
        "blocks.*.mlp.mlp.down_proj": row,
    }
    last_dense: Any = plait.models.from_huggingface(cases.SPARSE["qwen2-moe-partly-dense"]())
    assert kinds(last_dense) == ["SparseMLP", "MLP"]
    rules = {path: rule for path, rule in last_dense.rules.items() if ".mlp." in path}
    assert rules["blocks.*.mlp.mlp.entrance"] == entrance
    assert rules["blocks.*.mlp.mlp.shared_expert.down_proj"] == row
    assert "blocks.0.mlp.post_attention_layernorm" not in rules


def test_a_layer_is_in_the_mode_of_the_model() -> None:
    for training in (True, False):
        layers: Any = plait.models.from_huggingface(cases.mixtral().train(training))
        assert layers.blocks[0].mlp.mlp.training == training


def registered_experts(model: Any) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("of a user", lambda module, hidden, *_: hidden)
    model.config._experts_implementation = "of a user"


def with_another_module(model: Any) -> None:
    model.model.layers[1].mlp.scale = nn.Identity()


def with_single_experts(model: Any) -> None:
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(24, 24)])


def hook(path: str) -> Change:
    return lambda model: model.get_submodule(path).register_forward_hook(lambda *_: None)


MLP = "model.layers.1.mlp"
JITTER = partial(cases.mixtral, router_jitter_noise=0.1)


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (JITTER, None, r"has router_jitter_noise = 0\.1, by which .* without it, with 0\."),
        (partial(cases.olmoe, clip_qkv=8.0), None, r"has clip_qkv = 8\.0, by which .* with None\."),
        (partial(cases.olmoe, hidden_act="gelu"), None, r"activation is a GELU\w* \(hidden_act = 'gelu'\)"),
        (cases.mixtral, hook(f"{MLP}.experts.act_fn"), "put no hooks on it"),
        (cases.qwen2_moe, hook(MLP), f"{MLP} .Qwen2MoeSparseMoeBlock. has hooks"),
        (cases.olmoe, hook(f"{MLP}.gate"), f"{MLP}.gate .OlmoeTopKRouter. has hooks"),
        (cases.qwen3_moe, hook(f"{MLP}.experts"), f"{MLP}.experts .Qwen3MoeExperts. has hooks"),
        (
            cases.mixtral,
            registered_experts,
            "experts_implementation is 'of a user', a function of test_sparse",
        ),
    ],
)
def test_what_plaits_experts_would_not_compute_is_refused(
    make: Any, change: Change | None, reason: str
) -> None:
    model = make()
    if change is not None:
        change(model)
    with pytest.raises(ModelError, match=reason):
        plait.models.from_huggingface(model)


@pytest.mark.parametrize(
    "make",
    [
        partial(cases.mixtral, router_aux_loss_coef=0.0, output_router_logits=True),
        partial(cases.mixtral, router_aux_loss_coef=0.1),
        partial(cases.mixtral, hidden_act="swish"),
        partial(cases.olmoe, experts_implementation="grouped_mm"),
    ],
)
def test_values_that_change_nothing_are_taken(make: Any) -> None:
    """Settings of transformers that leave the result as it is are not refused."""
    model = cases.drawn(make).eval()
    tokens = torch.arange(16).view(2, 8) % cases.GPT2_VOCAB
    model.config._experts_implementation = "eager"
    with cases.norms_in_float64(), torch.no_grad():
        expected = model(tokens).logits
        found = plait.models.from_huggingface(model)(tokens)
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (cases.mixtral, Balance()),
        (partial(cases.mixtral, output_router_logits=True, router_aux_loss_coef=0.0), Balance()),
        (partial(cases.olmoe, output_router_logits=True), Balance(0.01, counts="step", coupled=True)),
        (
            partial(cases.gpt_oss, output_router_logits=True, router_aux_loss_coef=0.9),
            Balance(0.9, counts="step", coupled=True),
        ),
        (partial(cases.deepseek_v3, output_router_logits=True), Balance()),  # which transformers ignores
    ],
)
def test_the_configuration_says_which_balance_loss_is_added(make: Any, expected: Balance) -> None:
    layers = plait.models.from_huggingface(make())
    assert {one.balance for one in layers.modules() if isinstance(one, Router)} == {expected}


def test_a_shared_expert_with_a_hook_computes_as_in_transformers() -> None:
    model: Any = cases.drawn(cases.qwen2_moe).eval()
    model.get_submodule(f"{MLP}.shared_expert").register_forward_hook(lambda *given: 2 * given[2])
    tokens = torch.arange(16).view(2, 8) % cases.GPT2_VOCAB
    with cases.norms_in_float64(), torch.no_grad():
        expected = model(tokens).logits
        found = plait.models.from_huggingface(model)(tokens)
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_a_window_of_no_positions_is_refused() -> None:
    model = cases.qwen2_moe(layer_types=["sliding_attention"] * 2)
    with pytest.raises(ModelError, match=r"for layer 0, with sliding_window = 0: give"):
        plait.models.from_huggingface(model)
