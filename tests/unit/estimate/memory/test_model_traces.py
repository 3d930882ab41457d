from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.blueprint import build_blueprint
from plait.estimate.memory.model_traces import ModelTraces, trace_model
from plait.plan.plan import Plan

ROWS = 3


def traced(model: nn.Module, given: Tensor, **plan: Any) -> ModelTraces:
    return trace_model(build_blueprint(model, Plan(**plan)), given, None, plait.cross_entropy)


def until_weights(traces: ModelTraces, layer: int) -> int:
    """Bytes that the backward of a layer makes and its weight work waits for."""
    backward = traces.layers[layer].backward
    return sum(backward.allocated.get(number, 0) for number in backward.saved)


def test_gradients_that_are_not_deferred_wait_where_each_micro_batch_is_reduced() -> None:
    model = nn.Sequential(*(nn.Conv1d(8, 8, 3, padding=1, device="meta") for _ in range(2)))
    given = torch.empty(ROWS, 8, 10)
    parameters = (8 * 8 * 3 + 8) * 4
    last, each = (
        traced(model, given, dp=2, strategy="gradients", reduce=reduce) for reduce in ("last", "each")
    )
    assert until_weights(last, 1) == 0
    assert until_weights(each, 1) == parameters


def test_traced_sizes_are_in_the_precision_of_the_plan() -> None:
    model = plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=32, context=8)
    tokens = torch.empty(ROWS, 8, dtype=torch.int64)
    half, whole = (traced(model, tokens, precision=precision) for precision in ("bf16", "fp32"))
    for one, other in zip(half.layers, whole.layers, strict=True):
        (small,), (large,) = one.forward.results, other.forward.results
        assert 2 * one.forward.allocated[small] == other.forward.allocated[large]
    assert half.inputs == whole.inputs == [ROWS * 8 * 8]
    assert half.targets == [ROWS * 8 * 8]
    floats = traced(
        nn.Linear(4, 4, device="meta"), torch.empty(ROWS, 4, dtype=torch.float64), precision="bf16"
    )
    assert floats.inputs == [ROWS * 4 * 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_become_their_own_gradient(precision: str, tp: int) -> None:
    model = plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=512, context=8)
    found = traced(model, torch.empty(ROWS, 8, dtype=torch.int64), tp=tp, precision=precision)
    assert sum(found.loss.forward.allocated.values()) == 0
    assert found.loss.backward.results == found.loss.inputs
    assert found.output_copy == 0


def test_logits_that_something_else_reads_are_copied() -> None:
    given = torch.empty(ROWS, 4)
    head = nn.Linear(4, 6, device="meta")
    assert traced(nn.Sequential(head), given).output_copy == 0
    assert traced(nn.Sequential(head, nn.Tanh()), given).output_copy == ROWS * 6 * 4
    head.register_forward_hook(lambda module, given, output: None)
    assert traced(nn.Sequential(head), given).output_copy == ROWS * 6 * 4


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.full), "llama"])
def test_equal_layers_are_traced_once_as_each_would_be(family: str) -> None:
    sizes = {"layers": 3, "hidden": 16, "heads": 2, "vocab": 32, "context": 8}
    once, apart = (getattr(plait.models, family)(**sizes) for _ in range(2))
    for number, block in enumerate(apart.blocks):
        block.attention.number = block.mlp.number = number  # so that no two are equal
    tokens = torch.empty(ROWS, 8, dtype=torch.int64)
    plan = {"tp": 2, "recompute": ("none", *["none", "full"] * 2, "selective", "none", "none")}
    found, expected = traced(once, tokens, **plan), traced(apart, tokens, **plan)
    assert [len({id(trace) for trace in one.layers}) for one in (found, expected)] == [6, 8]
    cached = [[[*layer.values()] for layer in one.caches] for one in (found, expected)]
    assert cached[0] == cached[1]
    assert replace(found, caches=()) == replace(expected, caches=())


def test_a_layer_that_stands_twice_is_traced_twice() -> None:
    shared = nn.Linear(4, 4, device="meta")
    traces = traced(nn.Sequential(shared, nn.ReLU(), shared), torch.empty(ROWS, 4))
    assert traces.layers[0].forward.allocated == traces.layers[2].forward.allocated
    assert len(traces.layers) == len(traces.infos) == 3
