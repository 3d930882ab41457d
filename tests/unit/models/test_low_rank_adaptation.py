from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import plait
from parity.lora_cases import adapted
from parity.norm import assert_equal
from plait.errors import ModelError
from plait.models.expert_lora import MATRICES, ExpertLora
from plait.models.lora import LoraLinear, adapter_values, adapters_of
from plait.rules import column, entrance, piece, replicated, row

SIZES = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 11, "context": 6}


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_all_linears_but_the_heads_are_adapted_and_the_rest_is_frozen() -> None:
    model = plait.lora(plait.models.llama(**SIZES))
    linears = ("attention.query", "attention.key", "attention.value", "attention.output")
    linears = (*linears, "mlp.gate", "mlp.up", "mlp.down")
    paths = [f"blocks.{block}.{name}" for block in range(2) for name in linears]
    assert list(adapters_of(model)) == paths
    assert trained(model) == [f"{path}.{half}.weight" for path in paths for half in ("down", "up")]


@pytest.mark.parametrize(
    ("targets", "count"),
    [(("query",), 2), (("blocks.0.*",), 7), (("*.mlp.*", "query"), 8), ("query", 2), (("head.output",), 1)],
)
def test_targets_are_patterns_of_paths_or_their_ends(targets: Any, count: int) -> None:
    assert len(adapters_of(plait.lora(plait.models.llama(**SIZES), targets=targets))) == count


def test_an_adapted_model_starts_as_the_model() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2))
        values = torch.randn(5, 4)
    expected = model(values)
    again = plait.lora(model, rank=2, dropout=0.5)
    assert again is model
    assert torch.equal(again(values), expected)
    assert 0.2 < float(model[0].down.weight.detach().std()) < 0.5
    with torch.no_grad():
        model[0].up.weight.fill_(1.0)
    assert not torch.equal(model(values), expected)


def test_values_are_those_of_names_and_the_seed() -> None:
    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2))
        return plait.lora(made, seed=seed)

    def values(seed: int) -> dict[str, torch.Tensor]:
        return dict(model(seed).state_dict())

    assert_equal(values(1), values(1), 0.0, "the value")
    assert not torch.equal(values(1)["0.down.weight"], values(2)["0.down.weight"])
    assert not torch.equal(values(1)["0.down.weight"][:, :3], values(1)["1.down.weight"][:, :3])
    drawn = adapter_values(model(2), 1)
    assert sorted(drawn) == [f"{layer}.{half}.weight" for layer in (0, 1) for half in ("down", "up")]
    assert_equal(drawn, {name: values(1)[name] for name in drawn}, 0.0, "the value")


def test_rules_follow_from_those_of_the_model() -> None:
    rules = plait.lora(plait.models.gpt2(**SIZES), dropout=0.1).rules
    of_query = {"base": column.by("parts_0"), "up": column.by("parts_0"), "down": replicated}
    of_output = {"base": row.by("parts_0"), "down": row.by("parts_0"), "dropout": piece}
    for name, expected in (("query", {**of_query, "dropout": replicated}), ("output", of_output)):
        start = f"blocks.*.attention.{name}"
        found = {key.removeprefix(f"{start}."): one for key, one in rules.items() if key.startswith(start)}
        assert found == expected
    assert rules["blocks.*.attention.norm"] == entrance


def test_rules_of_some_blocks_name_their_paths() -> None:
    rules = plait.lora(plait.models.gpt2(**SIZES), targets="blocks.1.mlp.up").rules
    assert "blocks.*.mlp.up" not in rules
    assert rules["blocks.0.mlp.up"] == rules["blocks.1.mlp.up.base"] == column


def test_adapters_of_linears_without_an_entrance_have_no_rule_replicated() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Linear(4, 4))
    model.rules = {"0.0": column, "0.1": row}  # type: ignore[assignment]
    assert plait.lora(model, dropout=0.1, targets="0.0").rules == {
        "0.0.base": column,
        "0.0.up": column,
        "0.1": row,
    }


def test_merged_values_are_those_of_the_model_with_its_adapters_added() -> None:
    model = adapted(lambda: plait.models.llama(**SIZES))
    merged = plait.models.merged_values(model)
    plain = plait.models.llama(**SIZES).to_empty(device="cpu").double()
    plain.load_state_dict(merged)
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))
    assert_equal({"logits": plain(tokens).detach()}, {"logits": model(tokens).detach()}, 1e-12, "the value")


def sparse(**options: Any) -> nn.Module:
    return plait.models.llama(**SIZES, experts=3, top_k=2, shared=4, **options)


def test_the_matrices_of_experts_that_targets_name_get_adapters() -> None:
    matrices = [f"blocks.{block}.mlp.mixture.experts.{name}" for block in (0, 1) for name in MATRICES]
    found = plait.lora(sparse(), targets=("experts.gate_up_proj", "experts.down_proj"), rank=2)
    assert list(adapters_of(found)) == [f"{path}_adapter" for path in matrices]
    trained = [name for name, one in found.named_parameters() if one.requires_grad]
    assert trained == [f"{path}_adapter.{half}" for path in matrices for half in ("down", "up")]
    assert list(adapters_of(plait.lora(sparse(), targets="blocks.1.*.experts.*"))) == [
        f"{path}_adapter" for path in matrices[2:]
    ]
    assert not any(isinstance(one, ExpertLora) for one in adapters_of(plait.lora(sparse())).values())


def test_adapters_of_experts_begin_like_those_of_linears() -> None:
    model = plait.lora(sparse(), targets="experts.*", rank=2)
    for name, value in adapter_values(model, 1).items():
        bound = 1 / math.sqrt(3 * value.shape[-1])
        assert value.std() == pytest.approx(bound, rel=0.5) if name.endswith("down") else not value.any()
    (one, other) = [value for name, value in adapter_values(model, 1).items() if "gate_up" in name][::2]
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, other)


def test_merged_values_of_experts_are_those_of_the_model_with_its_adapters_added() -> None:
    model = adapted(sparse, targets=("experts.*", "query"))
    plain = sparse().to_empty(device="cpu").double()
    plain.load_state_dict(plait.models.merged_values(model))
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))
    assert_equal({"logits": plain(tokens).detach()}, {"logits": model(tokens).detach()}, 1e-12, "the value")


def test_adapters_of_experts_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"target 'experts.down_proj' of lora matches no module of the model"
    ):
        plait.lora(plait.models.llama(**SIZES), targets="experts.down_proj")
    with pytest.raises(
        ModelError, match=r"down_proj is added to a weight of experts, and cannot have dropout"
    ):
        plait.lora(sparse(), targets="experts.down_proj", dropout=0.1)
    with pytest.raises(
        ModelError, match=r"matches no linear, but Experts: name the linears in it, such as 'mixt"
    ):
        plait.lora(sparse(), targets="mixture.experts")
    model = sparse()
    parametrize.register_parametrization(model.blocks[0].mlp.mixture.experts, "down_proj", nn.Identity())
    with pytest.raises(
        ModelError, match=r"around blocks.0.*down_proj is computed by torch.nn.utils.parametrize"
    ):
        plait.lora(model, targets="experts.down_proj")


def test_a_linear_in_two_places_is_adapted_once() -> None:
    shared = nn.Linear(4, 4)
    model = plait.lora(nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2)))
    assert model[0] is model[2]
    assert isinstance(model[0], LoraLinear)


def tied() -> nn.Module:
    return plait.models.gpt2(**SIZES)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"targets": "qurey"},
            "the target 'qurey' of lora matches no module of the model: name linears, such as query.",
        ),
        (
            {"targets": "*.attention"},
            "the target '*.attention' of lora matches no linear, but Attention: name the linears in it, such "
            "as '*.attention.*'.",
        ),
        (
            {"targets": "head.output"},
            "head.output shares its weight with another module, into which an adapter cannot be merged: "
            "leave it out of lora's targets.",
        ),
        ({"rank": 0}, "the rank of an adapter is 0: give a whole number of at least 1."),
        ({"alpha": 0.0}, "the alpha of an adapter is 0.0: give a number above 0."),
        ({"dropout": 1.0}, "an adapter has dropout = 1.0: give a probability from 0, and below 1."),
    ],
)
def test_lora_refuses_targets_and_options_that_make_no_adapter(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        plait.lora(tied(), **options)
    assert str(caught.value) == text


def test_a_model_is_adapted_once() -> None:
    with pytest.raises(ModelError, match="has adapters already"):
        plait.lora(plait.lora(tied()))
    with pytest.raises(ModelError, match="lora has no targets: name linears, or give None"):
        plait.lora(tied(), targets=())


NOT_PARAMETERS = {
    "torch.nn.utils.weight_norm": nn.utils.weight_norm,
    "torch.nn.utils.spectral_norm": nn.utils.spectral_norm,
    "torch.nn.utils.parametrize": nn.utils.parametrizations.weight_norm,
    "torch.nn.utils.prune": lambda one: prune.identity(one, "weight"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("utility", NOT_PARAMETERS)
@pytest.mark.parametrize("targets", [None, "0"])
def test_a_weight_that_is_computed_is_named_with_what_computes_it(utility: str, targets: str | None) -> None:
    model = nn.Sequential(NOT_PARAMETERS[utility](nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ModelError, match=f"the weight of 0 is computed by {utility} in each forward"):
        plait.lora(model, targets=targets)
    assert isinstance(plait.lora(model, targets="1")[1], LoraLinear)


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:Lazy modules")
def test_lora_refuses_parametrized_weights_without_values_naming_the_remedy() -> None:
    mesh = plait.Mesh(plait.Plan(), alone=True)
    for utility, norm in NOT_PARAMETERS.items():
        with torch.device("meta"):
            model = nn.Sequential(norm(nn.Linear(2, 2)))
        with pytest.raises(
            ModelError, match=rf"(?s){utility}.*: build the model with real values|{utility} comp"
        ):
            plait.parallelize(model, plait.Plan(), mesh, plait.cross_entropy)
    lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    for call in (
        lambda: plait.memory(lazy, plait.Plan(), torch.zeros(2, 2)),
        lambda: plait.lora(lazy),
        lambda: plait.lora(lazy, targets="0"),
        lambda: plait.parallelize(lazy, plait.Plan(), mesh, plait.cross_entropy),
    ):
        with pytest.raises(
            ModelError, match=r"0\.weight has no shape yet: run the model on a batch before, or"
        ):
            call()


def test_lora_refuses_a_model_without_a_linear_before_its_last_layer() -> None:
    with pytest.raises(ModelError, match="no linear before its last layer"):
        plait.lora(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))


def test_adapters_of_a_model_in_evaluation_mode_drop_out() -> None:
    """As models are that transformers reads from files."""
    model = plait.lora(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).eval(), rank=2, dropout=0.5)
    assert [one.dropout.training for one in model if isinstance(one, LoraLinear) and one.dropout] == [True]
    assert not any(one.training for one in model.eval().modules())
