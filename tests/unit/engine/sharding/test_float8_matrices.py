"""Weights of linears in float8: each has one scale, of all ranks' parts, and is gathered in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharding_cases import case_of, live_bytes, unit_of
from torch import Tensor, nn

from plait.engine.sharding.gatherer import Gatherer
from plait.plan.flat_buffer_specs import BufferSpec
from plait.plan.parameter_units import FLOAT8
from plait.plan.plan import Plan
from plait.ranks.group import Count
from plait.ranks.mesh import Mesh
from plait.schedules.lowering.program import (
    AwaitParameters,
    ComputeScales,
    GatherParameters,
    ReleaseParameters,
)
from plait.tensor.float8.cast import cast
from plait.tensor.float8.recipes import RECIPES

FORM = RECIPES["float8"].weight
SCALED = ("0.weight", "1.weight")


def two_linears() -> nn.Module:
    """Two linears whose largest values are in their first rows. The same on every rank."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 7)
        for linear in model.children():
            linear.get_parameter("weight")[0] *= 9
    return model


def step(gatherer: Gatherer) -> None:
    """What the program of a step does to gather all units: scales first, then each unit."""
    handlers = gatherer.handlers()
    for instruction in (
        ComputeScales(),
        *map(GatherParameters, gatherer.units),
        *map(AwaitParameters, gatherer.units),
    ):
        handlers[type(instruction)](instruction)


Gathered = dict[str, tuple[Tensor, Tensor]]
"""By name a weight as layers have it, as bytes, and its scale."""


def gathered_twice(plan: Plan, messages: bool) -> tuple[list[Gathered], dict[str, dict[str, Count]], int]:
    """This rank's weights in two steps, the traffic of the second, and the rank's place along `tp`."""
    mesh = Mesh(plan)
    units = case_of(two_linears(), plan, SCALED if plan.tp > 1 else (), SCALED).make_on(
        mesh, messages=messages
    )
    gatherer, found, traffic = Gatherer(units), list[Gathered](), {}
    for _ in range(2):
        gatherer.begin()
        before = mesh.traffic.snapshot()
        step(gatherer)
        traffic = mesh.traffic.since(before)
        scales = {key: scale for unit in units.values() for key, scale in unit.scales_of(0).items()}
        weights = {name: units[name[0]].parameters[name] for name in SCALED}
        found.append(
            {
                name: (one.detach().view(torch.uint8).clone(), scales[id(one)].clone())
                for name, one in weights.items()
            }
        )
        for name in units:
            gatherer.release(name)
        gatherer.finish()
        with torch.no_grad():
            for unit in units.values():
                for shard in unit.shard_parameters.values():
                    shard.mul_(1.37)
    return found, traffic, mesh.index("tp")


def expected(plan: Plan, factor: float) -> Gathered:
    """The weights of a step cast as a linear casts them: from the plan's precision, with one scale each."""
    weights = {
        name: one.detach() * factor for name, one in two_linears().named_parameters() if name in SCALED
    }
    return {name: tuple(cast(one.to(torch.bfloat16), FORM)) for name, one in weights.items()}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"dp": 3, "strategy": "full"}, False),
        ({"dp": 3, "strategy": "full", "offload": "parameters"}, False),
        ({"dp": 2, "strategy": "optimizer"}, False),
        ({"dp": 2, "strategy": "gradients", "offload": "full"}, False),
        ({"tp": 2}, False),
        ({"dp": 3, "strategy": "full"}, True),
        ({"dp": 2, "tp": 2, "strategy": "full"}, True),
    ],
    ids=str,
)
def test_weights_are_gathered_in_float8_by_the_scale_of_the_whole_matrix(
    rank_pool: Any, options: dict[str, Any], messages: bool
) -> None:
    plan = Plan(precision="bf16", linears="float8", **options)
    of_ranks = rank_pool.run(gathered_twice, plan, messages, ranks=plan.world)
    for steps, _, tp in of_ranks:
        for number, weights in enumerate(steps):
            for name, (data, scale) in expected(plan, 1.37**number if number else 1.0).items():
                rows = data.view(torch.uint8).chunk(plan.tp)[tp]
                assert torch.equal(weights[name][0], rows), (name, number)
                assert torch.equal(weights[name][1], scale), (name, number)


def elements(specs: list[BufferSpec], *, scaled: bool) -> int:
    return sum(spec.offsets.shard_size for spec in specs if spec.kind.scaled == scaled)


def test_what_linears_hold_is_gathered_in_half_the_bytes_after_one_reduction_of_all_scales(
    rank_pool: Any,
) -> None:
    plan = Plan(dp=2, tp=2, strategy="full", precision="bf16", linears="float8")
    case = case_of(two_linears(), plan, SCALED, SCALED)
    specs = [spec for each in case.buffer_specs.values() for spec in each]
    of_weights, of_biases = elements(specs, scaled=True), elements(specs, scaled=False)
    assert of_weights * 2 == case.model.get_parameter("0.weight").numel() // 2 + 64 * 32 // 2
    for _, traffic, _ in rank_pool.run(gathered_twice, plan, False, ranks=4):
        assert traffic["shard"]["all_gather"] == Count(4, 1 * of_weights + 2 * of_biases)
        assert traffic["shard"]["all_reduce"] == traffic["tp"]["all_reduce"] == Count(1, 2 * 4)


def test_scales_are_computed_once_a_step_and_again_after_the_optimizer() -> None:
    unit = unit_of(nn.Linear(64, 64), strategy="full", offload="full", precision="bf16", linears="float8")
    (matrices,) = [buffer for buffer in unit.buffers if buffer.scaled is not None]
    gatherer = Gatherer({"0": unit})
    (scale,) = unit.scales_of(0).values()
    gatherer.begin()
    step(gatherer)
    first = scale.item()
    with torch.no_grad():
        matrices.shard.mul_(2)
    step(gatherer)
    assert scale.item() == first, "parameters do not change within a step"
    gatherer.begin()
    step(gatherer)
    assert scale.item() == pytest.approx(2 * first)


def test_layers_have_their_weights_in_8_bits_and_the_optimizer_its_own_in_32() -> None:
    unit = unit_of(nn.Linear(64, 64), strategy="full", offload="full", precision="bf16", linears="float8")
    gatherer, between = Gatherer({"0": unit}), live_bytes([unit])
    gatherer.begin()
    step(gatherer)
    weight, bias = unit.parameters["0.weight"], unit.parameters["0.bias"]
    assert (weight.dtype, bias.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert live_bytes([unit]) == between + 64 * 64 + 2 * 64
    assert unit.shard_parameters["0.weight"].dtype == torch.float32
    gatherer.handlers()[ReleaseParameters](ReleaseParameters("0"))
    assert live_bytes([unit]) == between


def test_a_matrix_of_zeros_has_the_scale_1() -> None:
    layer = nn.Linear(64, 64)
    nn.init.zeros_(layer.weight)
    unit = unit_of(layer, strategy="full", offload="full", precision="bf16", linears="float8")
    gatherer = Gatherer({"0": unit})
    gatherer.begin()
    step(gatherer)
    assert [scale.item() for scale in unit.scales_of(0).values()] == [1.0]
    assert not unit.parameters["0.weight"].float().any()


def test_only_what_layers_have_as_a_copy_is_stored_in_float8() -> None:
    def stored(**options: Any) -> tuple[bool, str]:
        case = case_of(two_linears(), Plan(linears="float8", **options), (), SCALED)
        spec = next(spec for spec in case.buffer_specs["0"] if "0.weight" in spec.names)
        return spec.kind.scaled, spec.whole.dtype.name

    assert stored(dp=2, strategy="full") == (True, FLOAT8.name)
    assert stored(dp=2, strategy="optimizer") == (True, FLOAT8.name)
    assert stored(precision="bf16") == (True, FLOAT8.name), "masters are copied once a step in any case"
    assert stored(dp=2) == (False, "float32")
    assert stored(precision="bf16", master_precision="bf16") == (False, "bfloat16")
