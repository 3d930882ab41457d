from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding_cases import SHAPES, case_of, layer_with
from torch import nn

from plait.plan.flat_buffer_specs import BufferSpecs, build_buffer_specs
from plait.plan.layout import Flat, Layout, Replicate, Shard
from plait.plan.parameter_units import BufferKind, ModelParameter, resolve_units
from plait.plan.plan import Plan


class Mixed(nn.Module):
    """A layer with parameters of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.count = nn.Parameter(torch.tensor([5]), requires_grad=False)
        self.other = nn.Parameter(torch.ones(6))


def members(specs: BufferSpecs, unit: str = "0") -> list[tuple[str, ...]]:
    return [spec.names for spec in specs[unit]]


def kinds(plan: Plan) -> list[BufferKind]:
    return [spec.kind for spec in case_of(nn.Sequential(Mixed()), plan).buffer_specs["0"]]


def test_dtypes_and_frozen_parameters_have_buffers_of_their_own() -> None:
    assert members(case_of(nn.Sequential(Mixed()), Plan()).buffer_specs) == [
        ("0.wide",),
        ("0.narrow", "0.other"),
        ("0.frozen",),
        ("0.count",),
    ]
    assert [kind.trains for kind in kinds(Plan())] == [True, True, False, False]


def test_a_precision_is_for_floating_point_numbers() -> None:
    plan = Plan(precision="bf16")
    assert members(case_of(nn.Sequential(Mixed()), plan).buffer_specs) == [
        ("0.wide", "0.narrow", "0.other"),
        ("0.frozen",),
        ("0.count",),
    ]
    assert [kind.compute.name for kind in kinds(plan)] == ["bfloat16", "bfloat16", "int64"]


def test_frozen_parameters_are_sharded_only_with_strategy_full() -> None:
    def cut(**options: Any) -> list[bool]:
        return [kind.sharded for kind in kinds(Plan(dp=2, **options))]

    assert cut(strategy="none") == [False, False, False, False]
    assert cut(strategy="optimizer") == [True, True, False, False]
    assert cut(strategy="gradients") == [True, True, False, False]
    assert cut(strategy="full") == [True, True, True, True]
    assert cut(strategy="full", replicate=2) == [False, False, False, False], "alone along shard"
    assert cut(strategy="full", replicate=2, offload="full") == [True, True, True, True]


@pytest.mark.parametrize(
    ("offload", "offloaded"),
    [("none", (False, False)), ("parameters", (True, False)), ("full", (True, True))],
)
def test_offload_puts_shards_and_with_full_their_gradients_on_the_cpu(
    offload: Any, offloaded: tuple[bool, ...]
) -> None:
    plan = Plan(dp=2, strategy="full", offload=offload)
    spec = case_of(nn.Sequential(nn.Linear(64, 64)), plan).buffer_specs["0"][0]
    assert spec.shard is not None
    assert spec.shard_gradient is not None
    assert (spec.shard.offloaded, spec.shard_gradient.offloaded) == offloaded
    assert (spec.device_copy is not None) == (offload == "parameters")


@pytest.mark.parametrize(
    ("strategy", "own", "kept"),
    [
        ("none", (False, False), (True, True)),
        ("optimizer", (False, False), (True, True)),
        ("gradients", (False, True), (True, False)),
        ("full", (True, True), (False, False)),
    ],
)
def test_shards_are_views_of_the_buffer_that_a_strategy_keeps(
    strategy: Any, own: tuple[bool, ...], kept: tuple[bool, ...]
) -> None:
    plan = Plan(dp=2, strategy=strategy)
    spec = case_of(nn.Sequential(nn.Linear(64, 64)), plan).buffer_specs["0"][0]
    assert (spec.shard is not None, spec.shard_gradient is not None) == own
    assert spec.gradient is not None
    assert (spec.whole.kept, spec.gradient.kept) == kept
    assert spec.has_own_parameters == (strategy != "none")


@pytest.mark.parametrize("strategy", ["none", "optimizer", "gradients", "full"])
def test_cuda_graphs_free_no_whole_buffer_and_change_nothing_else(strategy: Any) -> None:
    eager, graphs = (
        case_of(
            nn.Sequential(nn.Linear(64, 64)), Plan(dp=2, strategy=strategy, cuda_graphs=one)
        ).buffer_specs["0"][0]
        for one in (False, True)
    )
    assert graphs.gradient is not None
    assert eager.gradient is not None
    assert not graphs.whole.freed
    assert not graphs.gradient.freed
    assert (eager.whole.freed, eager.gradient.freed) == (not eager.whole.kept, not eager.gradient.kept)
    assert (graphs.whole.kept, graphs.gradient.kept) == (eager.whole.kept, eager.gradient.kept)
    assert (graphs.shard, graphs.shard_gradient) == (eager.shard, eager.shard_gradient)


def test_buffers_of_units_are_separate_and_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1, bias=False))
    specs = case_of(model, Plan(dp=2, strategy="full")).buffer_specs
    assert {unit: members(specs, unit) for unit in specs} == {
        "0": [("0.weight", "0.bias")],
        "1": [],
        "2": [("2.weight",)],
    }


def test_offsets_in_a_buffer_are_those_of_the_largest_tp_shard() -> None:
    """Of 5 rows the first of two ranks has 3; the same places serve both."""
    model = nn.Sequential(nn.Linear(4, 5))
    plan = Plan(dp=2, tp=2, strategy="full")
    ((spec,),) = case_of(model, plan, cut=["0.weight"]).buffer_specs.values()
    assert {slot.name: tuple(slot.shape) for slot in spec.offsets.slots} == {
        "0.weight": (3, 4),
        "0.bias": (5,),
    }


def test_shards_replicated_over_tp_have_a_buffer_of_their_own() -> None:
    """Their gradients are summed over other ranks."""
    axes = {"replicate": 1, "shard": 1, "tp": 4}
    layouts = {
        "weight": Layout((8, 4), axes, {"tp": Shard(0, copies=2)}),
        "bias": Layout((8,), axes, {"tp": Shard(0)}),
    }
    parameters = {"weight": ModelParameter(summands=2), "bias": ModelParameter()}
    specs = build_buffer_specs(resolve_units(Plan(), parameters, {"0": [*layouts]}, {"0": (0,)}), layouts)
    assert {spec.names: spec.kind.summands for spec in specs["0"]} == {
        ("weight",): 2,
        ("bias",): 1,
    }


def test_the_optimizer_has_intervals_of_what_is_cut_and_all_of_the_rest() -> None:
    model = nn.Sequential(Mixed())
    whole = case_of(model, Plan(dp=2))
    assert whole.layouts == whole.whole_layouts
    shards = case_of(model, Plan(dp=2, strategy="optimizer"))
    changed = {name for name in shards.layouts if shards.layouts[name] != shards.whole_layouts[name]}
    assert changed == {"0.wide", "0.narrow", "0.other"}
    assert shards.layouts["0.other"].placements == (Replicate(), Flat((0, 0, 6)), Replicate())


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_intervals_of_parameters_are_those_that_the_buffers_shards_hold(
    shapes: list[tuple[int, ...]], ranks: int, tp: int
) -> None:
    model = layer_with(shapes)
    cut = [name for name, parameter in model.named_parameters() if parameter.dim()]
    plan = Plan(dp=ranks, tp=tp, strategy="full", offload="full")
    made = case_of(model, plan, cut)
    (spec,) = made.buffer_specs["0"]
    for slot in spec.offsets.slots:
        layout = made.layouts[slot.name]
        for where in range(tp):
            intervals = [layout.interval((0, rank, where)) for rank in range(ranks)]
            assert [interval.start for interval in intervals[1:]] == [
                interval.stop for interval in intervals[:-1]
            ]
            elements = torch.Size(layout.region((0, 0, where)).sizes).numel()
            holder = [rank for rank, interval in enumerate(intervals) for _ in interval]
            size = spec.offsets.shard_size
            assert holder == [(slot.start + element) // size for element in range(elements)]
