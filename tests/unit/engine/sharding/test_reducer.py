from __future__ import annotations

from typing import Any

import pytest
import torch
from sharding_cases import case_of, live_bytes, only_buffer, two_layers, unit_of
from torch import Tensor, nn

from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.reducer import Reducer
from plait.engine.sharding.unit import Unit
from plait.plan.layout import assemble
from plait.plan.plan import Plan
from plait.ranks.group import Count
from plait.ranks.mesh import Mesh
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    ReduceGradient,
    ScatterGradient,
)
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue

TRANSPORTS = pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
PLANS = (
    {"strategy": "none"},
    {"strategy": "optimizer"},
    {"strategy": "gradients"},
    {"strategy": "full"},
    {"strategy": "optimizer", "offload": "full"},
    {"strategy": "full", "offload": "parameters"},
)
EVERY_PLAN = pytest.mark.parametrize("plan", PLANS, ids=str)


def reducer_of(*widths: int) -> Reducer:
    """Alone: every group has one rank."""
    return Reducer({str(number): unit_of(nn.Linear(width, 1)) for number, width in enumerate(widths)})


def pattern(shape: torch.Size) -> Tensor:
    """What a backward adds to gradients of a shape, times a value: 1, 2, 3, 4, 1, …"""
    return (1.0 + torch.arange(shape.numel()) % 4).view(shape)


def add_to(unit: Unit, value: float) -> None:
    for gradient in unit.gradients_of(0).values():
        gradient += value * pattern(gradient.shape)


def run_step(reducer: Reducer, plan: Plan, values: list[float], scale: float = 1.0) -> None:
    """A step's instructions about units, where each micro-batch adds one of `values`."""
    do = reducer.handlers()
    reducer.begin(scale)
    scatters_each = plan.shards and plan.strategy != "optimizer"
    for number, value in enumerate(values):
        for name, unit in reversed(reducer.units.items()):
            if scatters_each:
                do[AllocateGradient](AllocateGradient(name))
            add_to(unit, value * scale)
            if scatters_each or (plan.shards and number + 1 == len(values)):
                do[ScatterGradient](ScatterGradient(name))
                do[AwaitScatter](AwaitScatter(name))
    for name in reducer.units:
        do[ReduceGradient](ReduceGradient(name))
    do[Finish](Finish())


def gradients_of(reducer: Reducer) -> dict[str, Tensor | None]:
    shards = (pair for unit in reducer.units.values() for pair in unit.shard_parameters.items())
    return {name: None if shard.grad is None else shard.grad.clone() for name, shard in shards}


def values_of(reducer: Reducer) -> set[float]:
    """What the pattern was multiplied by, in all of a lone rank's gradients."""
    gradients = gradients_of(reducer).values()
    return {value for one in gradients for value in (one / pattern(one.shape)).flatten().tolist()}


def test_steps_add_up_until_gradients_are_set_to_none() -> None:
    reducer = reducer_of(2, 3)
    for value in (1.0, 2.0, 4.0):
        run_step(reducer, Plan(), [value])
    assert values_of(reducer) == {7.0}
    for unit in reducer.units.values():
        for parameter in unit.shard_parameters.values():
            parameter.grad = None
    run_step(reducer, Plan(), [8.0])
    assert values_of(reducer) == {8.0}


def test_gradients_of_an_earlier_step_are_not_reduced_again() -> None:
    reducer = reducer_of(2)
    run_step(reducer, Plan(), [1.0])
    reducer.begin()
    assert values_of(reducer) == {0.0}, "only this step's own gradients go into the sum"
    add_to(reducer.units["0"], 2.0)
    reducer.finish()
    assert values_of(reducer) == {3.0}


def test_a_loss_scale_applies_to_its_own_step_only() -> None:
    reducer = reducer_of(2)
    run_step(reducer, Plan(), [1.0], scale=4.0)
    run_step(reducer, Plan(), [2.0], scale=16.0)
    assert values_of(reducer) == {3.0}


def test_gradients_may_be_thrown_away() -> None:
    reducer = reducer_of(2, 3)
    assert reducer.starts_anew
    run_step(reducer, Plan(), [1.0])
    assert not reducer.starts_anew
    reducer.drop()
    assert reducer.starts_anew
    assert set(gradients_of(reducer).values()) == {None}


def test_after_an_exception_nothing_is_carried_into_the_next_step() -> None:
    reducer = reducer_of(2)
    run_step(reducer, Plan(), [1.0])
    reducer.begin()
    add_to(reducer.units["0"], 100.0)
    reducer.clear()
    assert values_of(reducer) == {1.0}
    reducer.drop()
    run_step(reducer, Plan(), [2.0])
    assert values_of(reducer) == {2.0}


def test_a_gradient_that_no_product_wrote_is_zeroed_before_it_is_read() -> None:
    """Of two weights one is written; biases, and what lies between parameters, start at zero."""
    whole: dict[str, Any] = {"strategy": "full", "offload": "full"}
    for end, plan in (("reduce", {}), ("finish", {}), ("scatter", whole)):
        unit = unit_of(nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 3)]), **plan)
        one, other = (unit.parameters[f"0.{number}.weight"] for number in range(2))
        queue, (buffer,) = WeightGradientQueue(products={id(one), id(other)}), unit.buffers
        reducer = Reducer({"0": unit}, queue)
        for fails in (False, True, False):
            if not plan:
                buffer.whole_gradients[0].fill_(torch.nan)
            reducer.begin()
            if plan:
                reducer.open("0")
            assert queue.unwritten == {id(one), id(other)}
            assert plan or (one.grad.isnan().all() and other.grad.isnan().all()), "they are not filled"
            for weight in (one, other):
                weight.grad.fill_(torch.nan)
            assert queue.begins([one])
            one.grad.fill_(1.0)
            if fails:
                reducer.clear()
                assert not queue.unwritten
                continue
            if end != "finish":
                getattr(reducer, end)("0")
                assert not queue.unwritten
            if plan:
                reducer.collect("0")
            reducer.finish()
            assert not queue.unwritten
            assert buffer.shard_gradient.sum() == one.numel()
            assert unit.shard_parameters["0.0.weight"].grad.eq(1).all()
            reducer.drop()


ORDERS = ([0, 3, 3, 0], [3, 0, 0, 3])
"""In which stages come to add: stage 0 2²⁴ and then −2²⁴, stage 3 twice 1."""


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_stages_of_a_rank_are_added_up_apart(order: list[int]) -> None:
    """In float32 2²⁴ + 1 is 2²⁴: in one sum both 1 would be lost, or one of them."""
    units = case_of(nn.Sequential(nn.Linear(2, 1)), Plan()).make_alone(stages=(0, 3))
    (unit,), reducer = units.values(), Reducer(units)
    assert set(unit.parameters_of(0).values()).isdisjoint(unit.parameters_of(3).values())
    reducer.begin()
    values = {0: iter([2.0**24, -(2.0**24)]), 3: iter([1.0, 1.0])}
    for stage in order:
        value = next(values[stage])
        for parameter in unit.parameters_of(stage).values():
            assert parameter.grad is not None
            parameter.grad += value
    reducer.reduce("0")
    reducer.finish()
    assert {value for one in gradients_of(reducer).values() for value in one.flatten().tolist()} == {2.0}
    assert all(parameter.grad is None for parameter in unit.parameters_of(3).values())


def test_a_replaced_parameter_tensor_is_used_by_all_stages() -> None:
    (unit,) = case_of(nn.Sequential(nn.Linear(2, 1)), Plan()).make_alone(stages=(0, 3)).values()
    for parameter in unit.shard_parameters.values():
        parameter.data = parameter.data + 1
    Gatherer({"0": unit}).begin()
    for name, parameter in unit.parameters_of(3).items():
        assert parameter.data_ptr() == unit.shard_parameters[name].data_ptr()


def reducer_on(mesh: Mesh, plan: Plan, *, messages: bool = False) -> Reducer:
    return Reducer(case_of(two_layers(), plan).make_on(mesh, messages=messages))


def two_steps(plan: Plan, messages: bool) -> dict[str, Tensor | None]:
    """The gradients after two steps of two micro-batches, in which each rank adds other values."""
    mesh = Mesh(plan)
    reducer = reducer_on(mesh, plan, messages=messages)
    for value in (1.0, 8.0):
        run_step(reducer, plan, [value * (1 + mesh.rank), value * 2])
    return gradients_of(reducer)


def assert_summed(of_ranks: list[dict[str, Tensor | None]], plan: Plan, value: float) -> None:
    """The shards make the model's gradients, `value` times the pattern in each."""
    layouts = case_of(two_layers(), plan).layouts
    for name, parameter in two_layers().named_parameters():
        whole = assemble([gradients[name] for gradients in of_ranks], layouts[name])
        assert torch.equal(whole.float(), value * pattern(parameter.shape))


@TRANSPORTS
@EVERY_PLAN
def test_gradients_are_the_sums_over_all_ranks(rank_pool: Any, plan: dict[str, Any], messages: bool) -> None:
    chosen = Plan(dp=3, **plan)
    assert_summed(rank_pool.run(two_steps, chosen, messages, ranks=3), chosen, 9 * (1 + 2 + 3 + 3 * 2))


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_gradient_shards_are_summed_over_their_replicas_too(rank_pool: Any, strategy: Any) -> None:
    plan = Plan(dp=4, replicate=2, strategy=strategy)
    assert_summed(rank_pool.run(two_steps, plan, False, ranks=4), plan, 9 * (1 + 2 + 3 + 4 + 4 * 2))


@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
@EVERY_PLAN
def test_gradients_may_be_reduced_in_another_precision(
    rank_pool: Any, plan: dict[str, Any], gradient: Any
) -> None:
    """Whole numbers that bfloat16 can hold."""
    chosen = Plan(dp=2, gradient_precision=gradient, reduce_precision="bf16", **plan)
    assert_summed(rank_pool.run(two_steps, chosen, False, ranks=2), chosen, 9 * (1 + 2 + 2 * 2))


def apart_by_digits(plan: Plan) -> set[float]:
    """After micro-batches that add 128 and a half on each of two ranks; bfloat16 has 8 digits."""
    mesh = Mesh(plan)
    unit = case_of(nn.Sequential(nn.Linear(64, 63, bias=False)), plan).make_on(mesh)["0"]
    reducer = Reducer({"0": unit})
    run_step(reducer, plan, [128.0, 0.5])
    return set(unit.shard_parameters["0.weight"].grad.flatten().tolist())


@pytest.mark.parametrize("strategy", ["gradients", "full"])
def test_gradients_reduced_in_bf16_are_accumulated_in_fp32(rank_pool: Any, strategy: Any) -> None:
    """Each micro-batch travels in few digits; their sum, which goes nowhere, keeps all."""
    plan = Plan(dp=2, strategy=strategy, reduce="each", reduce_precision="bf16")
    for found in rank_pool.run(apart_by_digits, plan, ranks=2):
        assert found == {257.0, 2 * 257.0, 3 * 257.0, 4 * 257.0}


def test_with_one_rank_gradients_are_not_rounded_to_the_reduce_precision() -> None:
    unit = unit_of(nn.Linear(4, 1, bias=False), reduce_precision="bf16")
    run_step(Reducer({"0": unit}), Plan(), [257.0])
    assert unit.shard_parameters["0.weight"].grad.tolist() == [[257.0, 2 * 257.0, 3 * 257.0, 4 * 257.0]]


def counts(plan: Plan) -> dict[str, dict[str, Count]]:
    mesh = Mesh(plan)
    run_step(reducer_on(mesh, plan), plan, [1.0, 2.0])
    return mesh.traffic.snapshot()


def test_each_strategy_reduces_gradients_by_the_listed_collectives(rank_pool: Any) -> None:
    """Over `shard` whole gradients, once or each micro-batch; over `replicate` shards; else all over `dp`."""

    def size(plan: Plan) -> int:
        units = case_of(two_layers(), plan).buffer_specs.values()
        return sum(4 * spec.offsets.size for specs in units for spec in specs)

    whole = size(Plan(dp=2, strategy="full"))
    for strategy, times in (("optimizer", 1), ("full", 2)):
        wanted = {"shard": {"reduce_scatter": Count(2 * times, times * whole)}}
        assert rank_pool.run(counts, Plan(dp=2, strategy=strategy), ranks=2) == [wanted] * 2
        wanted["replicate"] = {"all_reduce": Count(2, whole // 2)}
        assert rank_pool.run(counts, Plan(dp=4, replicate=2, strategy=strategy), ranks=4) == [wanted] * 4
    wanted = {"dp": {"all_reduce": Count(2, size(Plan(dp=2)))}}
    assert rank_pool.run(counts, Plan(dp=2), ranks=2) == [wanted] * 2


def large_layer() -> nn.Module:
    """Where gradients are kept whole, ranks on one host would have this one's in common."""
    return nn.Sequential(nn.Linear(512, 512, bias=False))


def bytes_of_a_step(plan: Plan) -> list[int]:
    """Of gradients and parameters: between steps, with an open gradient, and when it was scattered."""
    unit = case_of(large_layer(), plan).make_on(Mesh(plan))["0"]
    reducer, found = Reducer({"0": unit}), [live_bytes([unit])]
    reducer.begin()
    reducer.open("0")
    found.append(live_bytes([unit]))
    reducer.scatter("0")
    reducer.collect("0")
    return [*found, live_bytes([unit])]


@pytest.mark.parametrize("strategy", ["gradients", "full"])
def test_a_whole_gradient_is_there_while_it_is_open(rank_pool: Any, strategy: Any) -> None:
    plan = Plan(dp=2, strategy=strategy)
    (spec,) = case_of(large_layer(), plan).buffer_specs["0"]
    for before, opened, after in rank_pool.run(bytes_of_a_step, plan, ranks=2):
        assert before == after
        assert opened == before + 4 * spec.offsets.size


def after_a_failure(plan: Plan, messages: bool) -> tuple[bool, Any]:
    """Whether a step that fails while it reduces leaves what was there; the gradients after the next one."""
    mesh = Mesh(plan)
    reducer = reducer_on(mesh, plan, messages=messages)
    run_step(reducer, plan, [1.0 + mesh.rank])
    before = gradients_of(reducer)
    reducer.begin()
    for name, unit in reducer.units.items():
        if plan.shards and plan.strategy != "optimizer":
            reducer.open(name)
        add_to(unit, 100.0)
        (reducer.scatter if plan.shards else reducer.reduce)(name)
    reducer.clear()
    kept = all(torch.equal(gradient, before[name]) for name, gradient in gradients_of(reducer).items())
    run_step(reducer, plan, [10.0 + mesh.rank])
    return kept, gradients_of(reducer)


@TRANSPORTS
@EVERY_PLAN
def test_a_failed_step_leaves_gradients_and_state_of_the_reducer_unchanged(
    rank_pool: Any, plan: dict[str, Any], messages: bool
) -> None:
    chosen = Plan(dp=2, **plan)
    of_ranks = rank_pool.run(after_a_failure, chosen, messages, ranks=2)
    assert [kept for kept, _ in of_ranks] == [True, True]
    assert_summed([gradients for _, gradients in of_ranks], chosen, 1 + 2 + 10 + 11)


def test_frozen_parameters_are_not_reduced() -> None:
    layer = nn.Linear(4, 1)
    layer.bias.requires_grad_(False)
    unit = unit_of(layer)
    run_step(Reducer({"0": unit}), Plan(), [1.0])
    assert unit.shard_parameters["0.bias"].grad is None
    assert unit.shard_parameters["0.weight"].grad is not None
    assert only_buffer(Unit("trains", unit.trainable, (0,))).parameters.keys() == {"0.weight"}
