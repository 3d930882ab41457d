"""Rules on the layers of a model: layouts, refusals, and the modules that stand in the place of others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_cases import assert_close, draw
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from parity.layers import Conv1D
from plait.errors import ModelError, PlanError
from plait.plan.layout import Layout, Shard, assemble, shard
from plait.ranks import Count, Group, Mesh, Traffic
from plait.rules import Rule, Rules, column, entrance, row, vocabulary
from plait.tensor.autograd.weight_gradient_queue import INPUT_ONLY, WEIGHTS_NEXT, WeightGradientQueue
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.apply_rules import apply_rules, layouts_of, match_modules
from plait.tensor.parallel.embedding_and_norm import VocabParallelEmbedding
from plait.tensor.parallel.linear import ColumnParallelLinear, RegionBoundary, RowParallelLinear
from plait.tensor.parallel.tensor_parallelism import TensorParallelism

AXES = {"replicate": 1, "shard": 2, "tp": 2}
WIDTH = 8


class Gated(nn.Module):
    """A region with two columns behind one norm."""

    def __init__(self, heads: Any = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 12)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        entered = self.norm(given)
        output: Tensor = given + self.down(torch.tanh(self.gate(entered)) * self.up(entered))
        return output


COLUMNS: Rules = {"*.gate": column.by("heads"), "*.up": column.by("heads"), "*.down": row.by("heads")}
ENTERED: Rules = {"*.norm": entrance, **COLUMNS}


def lonely(size: int, index: int = 0) -> Group:
    """A group for what never communicates."""
    return Group("tp", tuple(range(size)), index, None, Traffic(), 1.0)


def woven(
    layers: list[tuple[str, nn.Module]],
    matched: Rules,
    group: Group,
    queue: WeightGradientQueue | None = None,
) -> list[nn.Module]:
    """Woven with all that is outside of regions whole."""
    boundary = RegionBoundary(group, overlap=None if queue is None else queue.overlap)
    return apply_rules(layers, matched, group, [boundary] * len(layers), queue)


def seeded(*layers: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers in double precision with their paths, the same on every rank."""
    numbers: dict[int, int] = {}
    for layer in layers:
        for parameter in layer.double().parameters():
            number = numbers.setdefault(id(parameter), len(numbers))
            parameter.data.copy_(draw(*parameter.shape, seed=number) / 2)
    return [(str(number), layer) for number, layer in enumerate(layers)]


def cut(
    layers: list[tuple[str, nn.Module]], rules: Rules, group: Group, queue: WeightGradientQueue | None
) -> list[nn.Module]:
    """A copy of the layers, on this rank's parts, woven."""
    matched = match_modules(rules, layers)
    layouts = layouts_of(layers, matched, {"tp": group.size})
    memo: dict[int, Any] = {}
    for _, layer in layers:
        for parameter in layer.parameters():
            part = shard(parameter, layouts[id(parameter)], (group.index,))
            memo[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
    copies = copy.deepcopy([layer for _, layer in layers], memo)
    named = [(path, layer) for (path, _), layer in zip(layers, copies, strict=True)]
    return woven(named, matched, group, queue)


class TestLayouts:
    def test_each_parameter_of_a_layer_has_a_layout(self) -> None:
        layers = seeded(Gated())
        (layer,) = (layer for _, layer in layers)
        layouts = layouts_of(layers, match_modules(ENTERED, layers), AXES)
        found = {name: layouts[id(parameter)] for name, parameter in layer.named_parameters()}
        assert found == {
            "norm.weight": Layout((WIDTH,), AXES),
            "norm.bias": Layout((WIDTH,), AXES),
            "gate.weight": Layout((12, WIDTH), AXES, {"tp": Shard(0)}),
            "gate.bias": Layout((12,), AXES, {"tp": Shard(0)}),
            "up.weight": Layout((12, WIDTH), AXES, {"tp": Shard(0)}),
            "up.bias": Layout((12,), AXES, {"tp": Shard(0)}),
            "down.weight": Layout((WIDTH, 12), AXES, {"tp": Shard(1)}),
            "down.bias": Layout((WIDTH,), AXES),
        }

    def test_without_rules_all_parameters_are_unsharded(self) -> None:
        layers = seeded(Gated(), nn.Embedding(3, 2))
        layouts = layouts_of(layers, {}, AXES)
        for _, layer in layers:
            assert all(layouts[id(one)] == Layout(one.shape, AXES) for one in layer.parameters())

    def test_a_parameter_of_two_modules_needs_the_same_rule_on_both(self) -> None:
        table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        head.weight = table.weight
        layers = [("token", table), ("head", head)]
        same = match_modules({"token": vocabulary, "head": vocabulary}, layers)
        assert layouts_of(layers, same, AXES) == {id(table.weight): Layout((7, 4), AXES, {"tp": Shard(0)})}
        for rules in ({"token": vocabulary}, {"head": vocabulary}, {"token": vocabulary, "head": row}):
            with pytest.raises(PlanError, match=r"^token\.weight and head\.weight are one parameter, but"):
                layouts_of(layers, match_modules(rules, layers), AXES)

    def test_a_module_under_two_names_is_cut_under_both(self) -> None:
        layer = nn.Module()
        layer.one = layer.two = nn.Linear(4, 4)
        with pytest.raises(PlanError, match=r"0\.one\.weight and 0\.two\.weight are one parameter"):
            layouts_of([("0", layer)], match_modules({"0.one": column}, [("0", layer)]), AXES)

    def test_heads_fewer_than_ranks_are_replicated_over_tp(self) -> None:
        layers = [("0", Gated(heads=1))]
        matched = match_modules({"0.up": column.by("heads", repeated=True)}, layers)
        layouts = layouts_of(layers, matched, {**AXES, "tp": 4})
        assert layouts[id(layers[0][1].up.weight)].placements[2] == Shard(0, copies=4)

    def test_the_number_of_parts_is_an_attribute_of_an_enclosing_module(self) -> None:
        layer = nn.Module()
        layer.config = nn.Module()
        layer.config.heads = 3
        layer.up = nn.Linear(4, 12)
        layers = [("0", layer)]
        matched = match_modules({"0.up": column.by("config.heads")}, layers)
        layouts_of(layers, matched, {"tp": 3})
        with pytest.raises(PlanError, match=r"^0\.up with .* \[12, 4\] .* tp = 2: its 3 parts"):
            layouts_of(layers, matched, {"tp": 2})

    @pytest.mark.parametrize("heads", [None, "many", [2]])
    @pytest.mark.parametrize("name", ["heads", "missing", "norm.missing"])
    def test_an_attribute_that_is_no_number_is_refused(self, name: str, heads: object) -> None:
        layers = [("blocks.0", Gated(heads=heads))]
        matched = match_modules({"blocks.*.up": column.by(name)}, layers)
        with pytest.raises(
            PlanError, match=rf"^the rule of blocks\.0\.up partitions by '{name}', but the module"
        ):
            layouts_of(layers, matched, AXES)

    def test_a_layer_that_is_itself_cut_has_nothing_to_ask_for_parts(self) -> None:
        layers = [("head", nn.Linear(4, 8))]
        with pytest.raises(PlanError, match="the rule of head partitions by 'heads'"):
            layouts_of(layers, match_modules({"head": column.by("heads")}, layers), AXES)


class Scaled(nn.Linear):
    pass


class TestWhatARuleCanCut:
    @pytest.mark.parametrize(
        ("module", "rule", "reason"),
        [
            (Scaled(4, 4), column, "the rule column is for nn.Linear, but 0 is a Scaled"),
            (nn.LayerNorm(4), row, "the rule row is for nn.Linear, but 0 is a LayerNorm"),
            (nn.Embedding(4, 4), column, "the rule column is for nn.Linear, but 0 is a Embedding"),
            (
                nn.Conv1d(4, 4, 1),
                vocabulary,
                "vocabulary is for nn.Linear or nn.Embedding, but 0 is a Conv1d",
            ),
            (parametrizations.weight_norm(nn.Linear(4, 4)), column, "0 is a ParametrizedLinear"),
        ],
    )
    def test_a_rule_for_an_unsuited_module_is_refused(
        self, module: nn.Module, rule: Any, reason: str
    ) -> None:
        with pytest.raises(PlanError, match=reason):
            match_modules({"0": rule}, [("0", module)])

    @pytest.mark.parametrize(
        "alter",
        [
            lambda module: module.register_forward_hook(print),
            lambda module: module.register_forward_pre_hook(print),
            lambda module: module.register_full_backward_hook(print),
            lambda module: module.register_full_backward_pre_hook(print),
            lambda module: setattr(module, "forward", print),
            nn.utils.spectral_norm,
        ],
    )
    def test_a_module_with_hooks_is_refused_the_rules_that_replace_it(self, alter: Any) -> None:
        module = nn.Linear(4, 4)
        alter(module)
        with pytest.raises(PlanError, match=r"^0 has hooks, or a forward of its own, which"):
            match_modules({"0": column}, [("0", module)])
        match_modules({"0": entrance}, [("0", module)])

    def test_every_name_of_a_module_can_be_matched(self) -> None:
        layer = nn.Module()
        layer.one = layer.two = nn.Linear(4, 4)
        assert match_modules({"0.two": column}, [("0", layer)]) == {"0.two": column}


class TestWeave:
    def test_rules_replace_modules_and_keep_their_parameters(self) -> None:
        layer = Gated().eval()
        layer.up.weight.requires_grad_(False)
        held = dict(layer.named_parameters())
        queue = WeightGradientQueue()
        (made,) = woven([("0", layer)], match_modules(ENTERED, [("0", layer)]), lonely(2), queue)
        assert made is layer
        assert [type(part) for part in (layer.norm, layer.gate, layer.up, layer.down)] == [
            nn.LayerNorm,
            ColumnParallelLinear,
            ColumnParallelLinear,
            RowParallelLinear,
        ]
        assert all(held[name] is parameter for name, parameter in made.named_parameters())
        assert (layer.up.weight.requires_grad, layer.gate.weight.requires_grad) == (False, True)
        assert not any(module.training for module in made.modules())
        assert all(part.queue is queue for part in (layer.gate, layer.up, layer.down))
        assert list(made.state_dict()) == list(Gated().state_dict())

    @pytest.mark.parametrize("training", [True, False])
    def test_a_sharded_embedding_keeps_its_mode_and_padding_index(self, training: bool) -> None:
        layer = nn.Embedding(7, 4, padding_idx=-1).train(training)
        (made,) = woven([("0", layer)], {"0": vocabulary}, lonely(2))
        assert type(made) is VocabParallelEmbedding
        assert (made.padding_idx, made.training) == (6, training)
        assert made.weight is layer.weight

    @pytest.mark.parametrize("queue", [None, WeightGradientQueue()], ids=["plain", "deferred"])
    def test_columns_enter_by_themselves_where_no_entrance_is(
        self, queue: WeightGradientQueue | None
    ) -> None:
        overlap = None if queue is None else queue.overlap
        for rules, enters in ((COLUMNS, True), (ENTERED, False)):
            layer = Gated()
            woven([("0", layer)], match_modules(rules, [("0", layer)]), lonely(2), queue)
            assert (layer.gate.enters, layer.gate.boundary.overlap) == (enters, overlap)

    def test_options_of_a_rule_reach_the_module(self) -> None:
        layer = Gated()
        rules = {"0.up": replace(column, gather_output=True), "0.down": replace(row, input_is_parallel=False)}
        woven([("0", layer)], match_modules(rules, [("0", layer)]), lonely(2))
        assert (layer.up.gather_output, layer.down.input_is_parallel) == (True, False)

    def test_a_layer_that_stands_twice_is_made_parallel_once(self) -> None:
        layer = Gated()
        layers = [("0", layer), ("1", layer)]
        one, two = woven(layers, match_modules(ENTERED, layers), lonely(2))
        assert one is two is layer
        assert type(layer.up) is ColumnParallelLinear
        assert len(layer.norm._forward_hooks) == 1

    def test_modules_that_layers_share_stay_shared(self) -> None:
        one, two = Gated(), Gated()
        two.norm, two.up, two.again = one.norm, one.up, one.gate
        layers = [("0", one), ("1", two)]
        woven(layers, match_modules({**ENTERED, "1.again": column}, layers), lonely(2))
        assert type(one.up) is ColumnParallelLinear
        assert two.up is one.up
        assert two.again is one.gate
        assert two.gate is not one.gate
        assert len(one.norm._forward_hooks) == 1

    def test_a_module_under_two_names_in_a_layer(self) -> None:
        layer = nn.Module()
        layer.one = layer.two = nn.Linear(4, 4)
        layers = [("0", layer)]
        woven(layers, match_modules({"0.*": column}, layers), lonely(2))
        assert type(layer.one) is ColumnParallelLinear
        assert layer.two is layer.one

    def test_a_layer_that_is_itself_matched_is_replaced_wherever_it_stands(self) -> None:
        linear = nn.Linear(4, 4)
        layers = [("0", linear), ("1", nn.Tanh()), ("2", linear)]
        made = woven(layers, match_modules({"0": column, "2": column}, layers), lonely(2))
        assert type(made[0]) is ColumnParallelLinear
        assert made[0] is made[2]
        assert made[1] is layers[1][1]

    def test_children_of_a_sequence_are_replaced_in_their_order(self) -> None:
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        layers = [("", layer)]
        woven(layers, match_modules({"0": column, "2": row}, layers), lonely(2))
        assert [type(child) for child in layer] == [ColumnParallelLinear, nn.Tanh, RowParallelLinear]

    def test_an_entrance_gives_one_tensor(self) -> None:
        layer = nn.LSTM(4, 4)
        woven([("0", layer)], {"0": entrance}, lonely(2))
        with pytest.raises(ModelError, match=r"^0 has the rule entrance, but gave a tuple: "):
            layer(torch.ones(3, 4))

    def test_gathering_the_output_of_repeated_heads_is_refused(self) -> None:
        layers = [("0", Gated(heads=1))]
        rule = replace(column.by("heads", repeated=True), gather_output=True)
        with pytest.raises(PlanError, match=r"^0\.up with a weight of shape \[12, 8\] has the same"):
            woven(layers, match_modules({"0.up": rule}, layers), lonely(2))


class Joined(nn.Module):
    """A region whose linears have transposed weights, the first of them three linears in one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.norm = nn.LayerNorm(WIDTH)
        self.three = Conv1D(3 * 12, WIDTH)
        self.down = Conv1D(WIDTH, 12)

    def forward(self, given: Tensor) -> Tensor:
        one, two, three = self.three(self.norm(given)).chunk(3, dim=-1)
        output: Tensor = given + self.down(torch.tanh(one) * two + three)
        return output


JOINED: Rules = {"*.norm": entrance, "*.three": column.by("heads").joined(3), "*.down": row.by("heads")}


def transposed() -> list[tuple[str, nn.Module]]:
    return seeded(Joined(), Joined())


def sharing() -> list[tuple[str, nn.Module]]:
    """Two layers with a linear in common."""
    one, two = Gated(), Gated()
    two.up = one.up
    return seeded(one, two)


def run(one: nn.Module, two: nn.Module) -> tuple[Tensor, Tensor | None]:
    leaf = draw(5, WIDTH).requires_grad_()
    output = two(one(leaf))
    output.backward(draw(5, WIDTH, seed=9))
    return output.detach(), leaf.grad


def woven_on_a_rank(make: Any, rules: Rules, keeps: bool, spends: bool) -> Any:
    """Results, gradients of the parts, how much work was left after the backward, and the traffic."""
    mesh, queue = Mesh(tp=2), WeightGradientQueue()
    woven = nn.ModuleList(cut(make(), rules, mesh.group("tp"), queue if keeps else None))
    for parameter in woven.parameters():
        parameter.grad = torch.zeros_like(parameter)
    queue.mode = WEIGHTS_NEXT if spends else INPUT_ONLY
    results = run(*woven)
    left = len(queue.pending)
    queue.run()
    gradients = {name: parameter.grad for name, parameter in woven.named_parameters()}
    return results, gradients, left, mesh.traffic.snapshot()


@pytest.mark.parametrize(("keeps", "spends"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("make", "rules", "sums", "linears"),
    [(sharing, COLUMNS, 6, 6), (sharing, ENTERED, 4, 6), (transposed, JOINED, 4, 4)],
    ids=["columns", "entrance", "transposed"],
)
def test_parallel_layers_equal_plain_ones(thread_ranks, make, rules, sums, linears, keeps, spends):
    layers = make()
    layouts = layouts_of(layers, match_modules(rules, layers), {"tp": 2})
    plain = nn.ModuleList(layer for _, layer in layers)
    expected = run(*plain)
    answers = thread_ranks.run(woven_on_a_rank, make, rules, keeps, spends, ranks=2)
    for results, _, kept, traffic in answers:
        for got, wanted in zip(results, expected, strict=True):
            assert_close(got, wanted, "output or gradient of the input")
        assert kept == (linears if keeps and not spends else 0)
        assert traffic == {"tp": {"all_reduce": Count(sums, sums * 5 * WIDTH * 8)}}
    for name, parameter in plain.named_parameters():
        parts = [gradients[name] for _, gradients, _, _ in answers]
        assert_close(assemble(parts, layouts[id(parameter)]), parameter.grad, name)


def test_overlapped_weight_gradients_give_the_same_bits(thread_ranks):
    early, late = (
        thread_ranks.run(woven_on_a_rank, sharing, ENTERED, True, spends, ranks=2) for spends in (True, False)
    )
    for (_, ours, *_), (_, theirs, *_) in zip(early, late, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def classes_of(layer: tuple[str, nn.Module], matched: dict[str, Rule]) -> int | None:
    over_two = TensorParallelism(matched, {}, False, Group("tp", (0, 1), 0, None, Traffic(), 0.0))
    found = over_two.vocabulary_of(NamedLayer(*layer))
    return None if found is None else found.classes


@pytest.mark.parametrize(
    ("rules", "classes"),
    [
        ({"head.out": vocabulary}, 37),
        ({"head.out": replace(vocabulary, gather_output=True)}, None),
        ({"head.out": column}, None),
        ({}, None),
        ({"head.norm": entrance, "head.out": vocabulary}, 37),
    ],
)
def test_a_last_layer_whose_logits_are_sharded_gives_their_number_of_classes(
    rules: Rules, classes: int | None
) -> None:
    layer = nn.Module()
    layer.norm, layer.out = nn.LayerNorm(4), nn.Linear(4, 37)
    layers = [("head", layer)]
    assert classes_of(layers[0], match_modules(rules, layers)) == classes


def test_a_table_at_the_end_gives_no_classes() -> None:
    assert classes_of(("0", nn.Embedding(7, 4)), {"0": vocabulary}) is None
    assert classes_of(("0", nn.Linear(4, 7)), {"0": vocabulary}) == 7
