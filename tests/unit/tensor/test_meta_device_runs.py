"""Layers that are alike run once on the meta device, for all of them and for all ranks of a process."""

import pytest
import torch
from torch import nn

from plait.engine.blueprint import build_blueprint
from plait.errors import ModelError
from plait.models import gpt2
from plait.plan.plan import Plan
from plait.proof import layer_runs_on_meta as meta_device_runs
from plait.proof.layer_runs_on_meta import MetaLayers
from plait.ranks.group import Group, Traffic
from plait.rules import column, row
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.running_sequence import ContextParallelism, running

TOKENS = torch.zeros(2, 4, dtype=torch.int64)


def built(model, results, *, tp=2, index=0, precision="fp32", rules=None, sequence="none"):
    plan = Plan(tp=tp, precision=precision, sequence_parallel=sequence)
    blueprint = build_blueprint(model, plan, rules)
    rules_of_tp = blueprint.tensor_parallel(Group("tp", tuple(range(tp)), index, None, Traffic(), 1.0))
    return blueprint.meta_layers(rules_of_tp, {"replicate": 0, "shard": 0, "cp": 0, "tp": index}, results)


@pytest.fixture
def runs(monkeypatch):
    """The paths of the layers that run."""
    paths = []
    original = meta_device_runs.run_on_meta

    def run(layer, *arguments, **options):
        paths.append(layer.path)
        return original(layer, *arguments, **options)

    monkeypatch.setattr(meta_device_runs, "run_on_meta", run)
    return paths


def gpt2_of(layers, **options):
    return gpt2(layers=layers, hidden=8, heads=2, vocab=9, context=4, **options)


def test_equal_blocks_run_once_on_meta(runs):
    layers = built(gpt2_of(4), {})
    infos = layers.infer(TOKENS, input_gradients=False)
    assert len(infos) == len(layers.layers) == 10
    assert runs == ["embedding", "blocks.0.attention", "blocks.0.mlp", "head"]
    assert [info.tensors[0].shape for info in infos] == [(2, 4, 8)] * 9 + [(2, 4, 5)]
    layers.prove(TOKENS)
    assert len(runs) == 4, "they were proved as they ran"


def test_layers_with_frozen_parameters_run_on_meta_again_to_be_proved(runs):
    """As if all of them were trained."""
    model = gpt2_of(1, tied=False)
    model.head.requires_grad_(False)
    layers = built(model, {})
    layers.infer(TOKENS, input_gradients=False)
    layers.prove(TOKENS)
    assert runs == ["embedding", "blocks.0.attention", "blocks.0.mlp", "head", "head"]


class Scaled(nn.Module):
    """A parameter that each rank has whole, between two linears that `tp` divides."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(self.up(x) * self.scale)


def test_wrong_rules_are_refused_whenever_they_are_proved_and_shapes_are_inferred():
    layers, inputs = (
        built(nn.Sequential(Scaled()), {}, rules={"0.up": column, "0.down": row}),
        torch.ones(2, 8),
    )
    for _ in range(2):
        assert len(layers.infer(inputs, input_gradients=True)) == 1
        with pytest.raises(ModelError, match="the whole parameter scale is used inside a region"):
            layers.prove(inputs)


def test_another_rank_of_the_process_reuses_meta_results(runs):
    results = {}
    first = built(gpt2_of(2), results).infer(TOKENS, input_gradients=False)
    count = len(runs)
    assert built(gpt2_of(2), results).infer(TOKENS, input_gradients=False) == first
    assert len(runs) == count


@pytest.mark.parametrize("change", [{"tp": 1}, {"precision": "fp64"}], ids=str)
def test_another_number_of_ranks_or_dtype_runs_a_layer_on_meta_again(runs, change):
    results = {}
    built(gpt2_of(2), results).infer(TOKENS, input_gradients=False)
    count = len(runs)
    built(gpt2_of(2), results, **change).infer(TOKENS, input_gradients=False)
    assert len(runs) == 2 * count


def test_another_rank_of_tp_runs_layers_on_meta_again_that_are_not_divided_evenly(runs):
    """Nine tokens of a vocabulary are not, in the embedding and the head."""
    results = {}
    built(gpt2_of(2), results).infer(TOKENS, input_gradients=False)
    runs.clear()
    second = built(gpt2_of(2), results, index=1).infer(TOKENS, input_gradients=False)
    assert runs == ["embedding", "head"]
    assert second[-1].tensors[0].shape == (2, 4, 4)


@pytest.mark.parametrize(("length", "parts", "again"), [(4, [2, 2], 0), (3, [2, 1], 4)])
def test_ranks_of_tp_have_parts_of_a_sequence_of_their_own_sizes(runs, length, parts, again):
    results, model = {}, gpt2(layers=1, hidden=8, heads=2, vocab=10, context=4)
    for index, part in enumerate(parts):
        runs.clear()
        layers = built(model, results, index=index, sequence="keep")
        infos = layers.infer(TOKENS[:, :length], input_gradients=False)
        assert [info.tensors[0].shape[1] for info in infos] == [part, part, part, length]
    assert len(runs) == again


def test_other_shapes_and_grad_modes_run_a_layer_on_meta_again(runs):
    layers = built(gpt2_of(1), {})
    layers.infer(TOKENS, input_gradients=False)
    count = len(runs)
    layers.infer(TOKENS[:1], input_gradients=False)
    with torch.no_grad():
        layers.infer(TOKENS, input_gradients=False)
    assert len(runs) == 3 * count


def test_one_layer_that_differs_is_not_taken_for_the_others():
    """The fourth layer halves its output: what follows it has other shapes."""

    class Halving(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by, self.linear = by, nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x)[: len(x) // self.by]

    model = nn.Sequential(*(Halving(1) for _ in range(3)), Halving(2), Halving(1))
    layers = built(model, {}, tp=1)
    infos = layers.infer(torch.zeros(4, 8), input_gradients=False)
    assert [info.tensors[0].shape[0] for info in infos] == [4, 4, 4, 2, 2]


def test_a_frozen_layer_is_not_taken_for_a_trained_one():
    model = gpt2_of(2)
    for parameter in (*model.embedding.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)
    infos = built(model, {}).infer(TOKENS, input_gradients=False)
    assert [info.tensors[0].requires_grad for info in infos] == [False, False, False, True, True, True]


def test_a_rule_that_is_missing_in_a_later_block_is_found():
    rules = dict(gpt2_of(1).rules)
    model = gpt2_of(2)
    rules = {
        pattern.replace("*", "0", 1) if "mlp.up" in pattern else pattern: rule
        for pattern, rule in rules.items()
    }
    with pytest.raises(ModelError, match=r"blocks\.1\.mlp"):
        built(model, {}, rules=rules).infer(TOKENS, input_gradients=False)


def test_the_number_of_kept_meta_results_is_bounded(monkeypatch):
    monkeypatch.setattr(meta_device_runs, "MOST_RESULTS", 5)
    results = {}
    layers: MetaLayers = built(gpt2_of(1), results)
    for rows in range(1, 6):
        layers.infer(TOKENS[:1].expand(rows, 4), input_gradients=False)
    assert len(results) == 5


def test_other_documents_repeat_a_meta_run_only_if_one_is_longer(runs):
    """A layer that took a document takes shorter ones; a longer one may be beyond its context, which is 4."""
    layers, one_rank = built(gpt2_of(1), {}), ContextParallelism.of_one_rank()

    def repeated(*ids):
        before = len(runs)
        with running(one_rank.sequence(len(ids), document_bounds(torch.tensor([ids])))):
            layers.infer(torch.zeros(1, len(ids), dtype=torch.int64), input_gradients=False)
        return len(runs) - before

    assert [repeated(0, 0, 1, 1, 2), repeated(0, 1, 1, 2, 2), repeated(0, 1, 2, 3, 4)] == [4, 0, 0]
    assert [repeated(0, 0, 0, 0, 1), repeated(0, 0, 0, 1, 1), repeated(0, 1, 1, 1, 1)] == [4, 0, 0]
    with pytest.raises(ModelError, match="longer than the model's context of 4"):
        repeated(0, 0, 0, 0, 0)
    assert repeated(0, 1, 1, 1, 1) == 0
