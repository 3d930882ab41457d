"""Which linears `Plan.linears` chooses, the reasons of the others, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from plait.engine import parallelize
from plait.engine.blueprint import build_blueprint
from plait.errors import ModelError, PlanError
from plait.models.choose_float8_linears import choose_linears
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.plan import Plan
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router
from plait.verification.definitions.float8_experts import experts_in_float8
from plait.verification.definitions.float8_linear_selection import linears_in_float8

LLAMA = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "vocab": 32, "context": 8}
IN_ATTENTION = [f"blocks.0.attention.{name}" for name in ("query", "key", "value", "output")]
IN_MLP = [f"blocks.0.mlp.{name}" for name in ("gate", "up", "down")]


def choice_of(model: nn.Module, plan: Plan | None = None) -> Any:
    return build_blueprint(model, plan or Plan(linears="float8")).float8


def test_all_linears_of_blocks_are_chosen_and_the_head_is_not() -> None:
    choice = choice_of(plait.models.llama(**LLAMA))
    assert list(choice.chosen) == [*IN_ATTENTION, *IN_MLP]
    assert choice.others == {"head.output": "head"}
    assert choice.line("float8") == (
        "Linears: 7 multiply in float8; the others stay in the run's precision: head.output (head)."
    )
    assert choice.within("blocks.0.mlp") == ("gate", "up", "down")


def test_the_choice_is_the_same_under_every_plan() -> None:
    model = plait.models.llama(**LLAMA)
    plans = Plan(), Plan(tp=2, sequence_parallel="keep"), Plan(pp=2, dp=2, strategy="full", loss_rows=4)
    choices = [choice_of(model, plait.Plan(**{**vars(plan), "linears": "float8"})) for plan in plans]
    assert choices[0] == choices[1] == choices[2]


def test_adapters_tied_weights_odd_sizes_and_hooks_stay_as_they_are() -> None:
    adapted = plait.lora(plait.models.llama(**LLAMA), rank=16, targets=["*.mlp.up"])
    others = choice_of(adapted).others
    assert others == {
        "blocks.0.mlp.up.down": "adapter",
        "blocks.0.mlp.up.up": "adapter",
        "head.output": "head",
    }
    assert "blocks.0.mlp.up.base" in choice_of(adapted).chosen
    table = nn.Embedding(32, 64)
    inside = nn.Linear(64, 32, bias=False)
    inside.weight = table.weight
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(table, inside, nn.Linear(32, 40), nn.Linear(40, 64), hooked, nn.Linear(64, 16))
    found = choose_linears(sequence_of(model).layers, {})
    assert found.others == {"1": "tied", "2": "sizes", "3": "sizes", "4": "hooks", "5": "head"}
    assert found.chosen == ()


SPARSE = {**LLAMA, "inner": 32, "experts": 4, "shared": 32}
IN_MIXTURE = "blocks.0.mlp.mixture.experts"


@pytest.mark.parametrize("recipe", ["float8", "float8-rowwise", "float8-rowwise-gw"])
def test_experts_multiply_row_by_row_whatever_linears_do(recipe: Any) -> None:
    choice = choice_of(plait.models.llama(**SPARSE), Plan(linears=recipe))
    assert choice.experts == (IN_MIXTURE,)
    assert choice.others == {"head.output": "head"}
    assert choice.formats(recipe)[IN_MIXTURE] == "float8-rowwise-gw"
    assert choice.formats(recipe)["blocks.0.mlp.mixture.shared.down"] == recipe
    assert choice.within("blocks.0.mlp")[-1] == "mixture.experts"
    assert choice.line(recipe) == (
        f"Linears: 6 multiply in {recipe}, and 1 layer of experts in float8-rowwise-gw; the others stay in "
        "the run's precision: head.output (head)."
    )


def test_experts_with_odd_sizes_hooks_or_shared_weights_stay_as_they_are() -> None:
    def reasons(change: Any, **sizes: int) -> str:
        model: nn.Module = plait.models.llama(**{**SPARSE, "layers": 2, **sizes})
        first, second = (module for module in model.modules() if isinstance(module, Experts))
        change(first, second)
        choice = choice_of(model)
        assert list(choice.experts) == experts_in_float8(sequence_of(model).layers)
        return str(choice.others.get(IN_MIXTURE))

    class Own(Experts):
        pass

    def share(first: Any, second: Any) -> None:
        second.down_proj = first.down_proj

    assert reasons(lambda first, _: None) == "None"
    assert reasons(lambda first, _: first.register_forward_hook(lambda *_: None)) == "hooks"
    assert reasons(lambda first, _: None, inner=24) == "sizes"
    assert reasons(lambda first, _: setattr(first, "__class__", Own)) == "subclass"
    assert reasons(share) == "tied"


def test_a_model_of_experts_alone_multiplies_in_float8() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), Routed(), nn.Linear(32, 16))
    choice = choice_of(model)
    assert (choice.chosen, choice.experts) == ((), ("2.experts",))


class Routed(nn.Module):
    """Experts, of which each position has two."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(32, 4, 2), Experts(32, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        _, weights, indices = self.router(rows)
        result: Tensor = self.experts(rows, indices, weights).view_as(x)
        return result


def test_shards_of_experts_that_are_no_multiple_of_16_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"etp cuts gate_up_proj of .* \[4, 96, 64\] to \[4, 48, 64\], no|to \["
    ):
        choice_of(plait.models.llama(**SPARSE | {"inner": 48}), Plan(dp=2, etp=2, linears="float8"))


def test_linears_of_a_subclass_are_listed_and_may_be_the_head() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Own(64, 64), nn.Linear(64, 64), Own(64, 16))
    layers = sequence_of(model).layers
    found = choose_linears(layers, {})
    assert found.others == {"1": "subclass", "3": "head"}
    assert list(found.chosen) == linears_in_float8(layers, {}) == ["0", "2"]


def test_a_model_without_a_linear_that_can_multiply_so_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no linear .* can multiply in float8 \(0: sizes, 1: head\)"):
        choice_of(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)))


def test_shards_that_are_no_multiple_of_16_or_of_repeated_heads_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the weight of blocks.0.mlp.gate \[96, 64\] to \[24, 64\], no"):
        choice_of(plait.models.llama(**LLAMA | {"kv_heads": 4}), Plan(tp=4, linears="float8"))
    with pytest.raises(PlanError, match=r"2 ranks of tp hold the same features of blocks.0.attention.key"):
        choice_of(plait.models.llama(**LLAMA | {"inner": 128}), Plan(tp=4, linears="float8"))


def test_a_model_in_fp16_is_refused_as_a_plan_in_fp16_is() -> None:
    with pytest.raises(PlanError, match=r"plan.linears is 'float8', and the model is in fp16"):
        choice_of(plait.models.llama(**LLAMA).half())


def test_mxfp8_is_refused_by_name_also_where_it_is_predicted_or_searched() -> None:
    plan, model, inputs = Plan(linears="mxfp8"), nn.Sequential(nn.Linear(16, 16)), torch.empty(1, 16)
    about = {"inputs": inputs, "targets": inputs, "loss": nn.MSELoss()}
    for refused in (
        lambda: plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy),
        lambda: plait.memory(model, plan, inputs),
        lambda: plait.plans(model, "h100-sxm", ranks=2, batch=2, base=plan, **about),
    ):
        with pytest.raises(PlanError, match=r"plan.linears is 'mxfp8', which plait does not implement"):
            refused()


def test_an_engine_says_how_each_linear_multiplies() -> None:
    plan = Plan(linears="float8-rowwise", precision="bf16")
    engine = plait.parallelize(plait.models.llama(**LLAMA), plan, plait.Mesh(plan), plait.cross_entropy)
    assert engine.linear_formats == {
        **dict.fromkeys([*IN_ATTENTION, *IN_MLP], "float8-rowwise"),
        "head.output": "head",
    }
    plain = plait.parallelize(plait.models.llama(**LLAMA), Plan(), plait.Mesh(Plan()), plait.cross_entropy)
    assert plain.linear_formats == {}


def test_a_device_without_such_products_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelize, "multiplies_float8", lambda device: False)
    plan = Plan(linears="float8")
    with pytest.raises(PlanError, match=r"plan.linears is 'float8', but cpu has no products in float8"):
        plait.parallelize(plait.models.llama(**LLAMA), plan, plait.Mesh(plan), plait.cross_entropy)


class ReadsAWeight(nn.Module):
    """A linear, and one of the ways in which its weight may be read by itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.up.forward(input)
        if self.way == "dtype" or (self.way == "evaluation" and not self.training):
            hidden = hidden.to(self.down.weight.dtype)
        if self.way == "linear":
            return functional.linear(hidden, self.down.weight, bias=self.down.bias)
        if self.way == "detach":
            hidden = hidden * self.down.weight.detach().float().norm()
        if self.way == "shape":
            hidden = hidden * self.down.weight.shape[0]
        return self.down(hidden)  # type: ignore[no-any-return]


def engine_that_reads(way: str, linears: Any) -> tuple[Any, Tensor, Tensor]:
    plan = Plan(linears=linears, precision="bf16")
    model = nn.Sequential(ReadsAWeight(way), nn.Linear(32, 4))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    return engine, torch.ones(2, 32), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("way", ["dtype", "linear", "detach"])
def test_a_layer_that_reads_a_weight_in_8_bits_by_itself_is_refused(way: str) -> None:
    engine, inputs, targets = engine_that_reads(way, "float8")
    with pytest.raises(ModelError, match=rf"layer '0' reads 0\.down\.weight by {way}, outside of its linear"):
        engine.forward_backward(inputs, targets)


def test_a_layer_that_reads_a_weight_in_8_bits_only_in_evaluations_is_refused_there() -> None:
    engine, inputs, targets = engine_that_reads("evaluation", "float8")
    engine.forward_backward(inputs, targets)
    with pytest.raises(ModelError, match=r"layer '0' reads 0\.down\.weight by dtype"):
        engine.evaluate(inputs, targets)


@pytest.mark.parametrize(("way", "linears"), [("shape", "float8"), ("detach", "float8-rowwise")])
def test_shapes_and_weights_that_stay_in_the_precision_may_be_read(way: str, linears: str) -> None:
    engine, inputs, targets = engine_that_reads(way, linears)
    assert engine.forward_backward(inputs, targets).isfinite()


@pytest.mark.parametrize("recipe", ["float8", "float8-rowwise"])
def test_evaluations_of_an_encoder_layer_of_torch_multiply_in_float8_as_training_does(recipe: Any) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    plan = Plan(linears=recipe, precision="fp64")
    model = nn.Sequential(layer, nn.Linear(32, 4))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    inputs = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.zeros(2, 5, dtype=torch.int64)
    torch.testing.assert_close(engine.evaluate(inputs, targets), engine.forward_backward(inputs, targets))


def test_experts_that_two_layers_share_train_in_float8() -> None:
    first, second = (plait.MixtureOfExperts(32, 32, 4, 2) for _ in range(2))
    second.experts = first.experts
    model = nn.Sequential(nn.Embedding(64, 32), first, second, nn.Linear(32, 64))
    plan = Plan(microbatches=2, linears="float8", precision="bf16", master_precision="fp32")
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    ids = torch.arange(32).view(2, 16)
    assert engine.forward_backward(ids, ids).isfinite()
