from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding_cases import SHAPES, case_of, layer_with, live_bytes, only_buffer, unit_of
from torch import nn
from torch.nn import functional

from plait.plan.flat_buffer_specs import ALIGNMENT
from plait.plan.layout import assemble, shard
from plait.plan.plan import Plan

STRATEGIES = ("none", "optimizer", "gradients", "full")
MIXED = {"precision": "bf16", "master_precision": "fp32"}


@given(SHAPES)
def test_every_parameter_is_a_view_at_an_aligned_place(shapes: list[tuple[int, ...]]) -> None:
    model = layer_with(shapes)
    unit = case_of(model, Plan()).make_alone()["0"]
    buffer = only_buffer(unit)
    assert buffer.gradient is not None
    assert buffer.whole.numel() % ALIGNMENT == 0
    assert buffer.gradient.shape == buffer.whole.shape
    covered = torch.zeros_like(buffer.whole)
    for slot, (name, wanted) in zip(buffer.spec.offsets.slots, model.named_parameters(), strict=True):
        assert (slot.name, slot.shape, slot.start % ALIGNMENT) == (name, wanted.shape, 0)
        assert torch.equal(unit.parameters[name], wanted)
        covered[slot.start : slot.stop] += 1
        buffer.whole[slot.start : slot.stop] = 7.0
        assert (unit.parameters[name] == 7).all()
    assert not (covered > 1).any(), "no two parameters overlap"
    assert (buffer.whole[covered == 0] == 0).all(), "padding is zero"


@given(SHAPES, st.integers(1, 4), st.integers(1, 2), st.sampled_from(STRATEGIES))
def test_the_shards_of_all_ranks_make_up_the_model(
    shapes: list[tuple[int, ...]], ranks: int, tp: int, strategy: Any
) -> None:
    model = layer_with(shapes)
    cut = [name for name, parameter in model.named_parameters() if parameter.dim()]
    made = case_of(model, Plan(dp=ranks, tp=tp, strategy=strategy), cut)
    units = {(0, *at): made.make_alone(*at)["0"] for at in product(range(ranks), range(tp))}
    for name, parameter in model.named_parameters():
        shards = {at: unit.shard_parameters[name] for at, unit in units.items()}
        assert torch.equal(assemble(shards, made.layouts[name]), parameter)
        for at, unit in units.items():
            if strategy != "full" or ranks == 1:
                wanted = shard(parameter, made.whole_layouts[name], at)
                assert torch.equal(unit.parameters[name], wanted), "what layers use"


@pytest.mark.parametrize(
    ("plan", "bytes_an_element"),
    [
        ({"strategy": "none"}, 4 + 4),
        ({"strategy": "optimizer"}, 4 + 4),
        ({"strategy": "gradients"}, 4 + 4 / 4),
        ({"strategy": "full"}, 4 / 4 + 4 / 4),
        ({"strategy": "full", "replicate": 2}, 4 / 2 + 4 / 2),
        ({"strategy": "none", **MIXED}, 2 + 4 + 4),
        ({"strategy": "optimizer", **MIXED}, 2 + 4 + 4 / 4),
        ({"strategy": "gradients", **MIXED}, 2 + 4 / 4 + 4 / 4),
        ({"strategy": "full", **MIXED}, 4 / 4 + 4 / 4),
        ({"strategy": "full", "offload": "parameters"}, 4 / 4 + 4 / 4 + 4 / 4),
        ({"strategy": "full", "offload": "full"}, 4 / 4 + 4 / 4),
        ({"strategy": "optimizer", "offload": "full"}, 4 + 4 / 4 + 4 + 4 / 4),
    ],
    ids=str,
)
def test_a_unit_keeps_the_bytes_of_its_strategy_between_steps(
    plan: dict[str, Any], bytes_an_element: float
) -> None:
    """Of parameters and gradients; no padding here. What is offloaded counts, wherever it lies."""
    unit = unit_of(nn.Linear(64, 64), index=1, dp=4, **plan)
    assert live_bytes([unit]) == bytes_an_element * 65 * 64


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shard_is_a_view_of_a_buffer_that_is_kept_whole(strategy: Any) -> None:
    buffer = only_buffer(unit_of(nn.Linear(64, 64), index=2, dp=4, strategy=strategy))
    assert buffer.gradient is not None
    assert buffer.shard_gradient is not None
    assert buffer.spec.has_own_parameters == (strategy != "none")
    if strategy == "none":
        assert buffer.shard_parameters is buffer.parameters
        assert buffer.shard_gradient is buffer.gradient
        return
    assert buffer.shard.numel() == buffer.shard_gradient.numel() == 65 * 64 / 4
    within = buffer.shard.untyped_storage()._cdata == buffer.whole.untyped_storage()._cdata
    assert within == (strategy != "full")
    assert buffer.shard.storage_offset() == (2 * buffer.spec.offsets.shard_size if within else 0)
    assert buffer.spec.scatters_in_place == (strategy == "optimizer")
    assert bool(buffer.whole.untyped_storage().nbytes()) == (strategy != "full")
    assert bool(buffer.gradient.untyped_storage().nbytes()) == (strategy == "optimizer")


def test_gradients_may_have_more_digits_than_what_layers_use() -> None:
    """256 + 1 is 256 in bfloat16."""
    unit = unit_of(nn.Linear(4, 1, bias=False), **MIXED)
    buffer, weight = only_buffer(unit), unit.parameters["0.weight"]
    buffer.attach_gradients()
    for size in (256.0, 1.0):
        functional.linear(torch.full((1, 4), size, dtype=torch.bfloat16), weight).sum().backward()
    assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert weight.grad.tolist() == [[257.0] * 4]
    buffer.finish_gradients(None, 1.0)
    local = unit.shard_parameters["0.weight"]
    assert (local.dtype, local.grad.dtype, local.grad.tolist()) == (
        torch.float32,
        torch.float32,
        [[257.0] * 4],
    )


def test_the_optimizer_updates_a_master_with_more_digits() -> None:
    layer = nn.Linear(4, 1, bias=False)
    unit = unit_of(layer, **MIXED)
    assert torch.equal(unit.shard_parameters["0.weight"], layer.weight), "not rounded on the way"
    assert unit.parameters["0.weight"].dtype == torch.bfloat16


def test_frozen_parameters_of_a_unit_have_no_gradient_buffer() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    unit = unit_of(layer, index=1, dp=2, strategy="full")
    weight, bias = unit.buffers
    assert unit.trainable == (weight,)
    assert unit.gradients_of(0).keys() == {("0.weight", 0)}
    assert (bias.gradient, bias.shard_gradient, bias.replica_group) == (None, None, None)
    assert bias.attach_gradients() is None
    assert bias.current_gradients(unit.shard_parameters) == []
    assert {name: one.requires_grad for name, one in (unit.shard_parameters | unit.parameters).items()} == {
        "0.weight": True,
        "0.bias": False,
    }
