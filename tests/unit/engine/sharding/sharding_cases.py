"""What the tests of sharding share: the units of a rank, one for each child of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.engine.sharding.unit import Unit, UnitFactory
from plait.plan.flat_buffer_specs import BufferSpecs, build_buffer_specs, shard_layouts
from plait.plan.layout import Layout, Shard, shard
from plait.plan.parameter_units import ModelParameter, kind_of, resolve_units
from plait.plan.plan import Plan
from plait.ranks.group import Group, Traffic
from plait.ranks.mesh import Mesh
from plait.tensor.dtypes import named_dtype
from plait.tensor.float8.recipes import RECIPES

CPU = torch.device("cpu")
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)
"""Of a layer's parameters: numbers, empty ones, and fewer rows than ranks."""


def layer_with(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of one layer with random parameters, `0.0`, `0.1`, …"""
    return nn.Sequential(nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes))


def group_of(index: int = 0, ranks: int = 1, name: str = "shard") -> Group:
    """The place of one rank in a group whose other ranks are not there: no collective finds them."""
    return Group(name, tuple(range(ranks)), index, None, Traffic(), 1.0)


@dataclass(frozen=True)
class Case:
    """What all ranks know alike of a model, as its `Blueprint` would have it."""

    model: nn.Module
    plan: Plan
    whole_layouts: Mapping[str, Layout]
    buffer_specs: BufferSpecs
    layouts: Mapping[str, Layout]

    def make(
        self,
        at: Mapping[str, int],
        shard_group: Group,
        rest: Group,
        stages: tuple[int, ...] = (0,),
        tp_group: Group | None = None,
    ) -> dict[str, Unit]:
        """The units of the rank at a coordinate, all of whose `stages` use them."""
        parameters = dict(self.model.named_parameters())

        def value_of(name: str) -> Tensor:
            return shard(parameters[name], self.whole_layouts[name], at)

        factory = UnitFactory(
            device=CPU,
            layouts=self.layouts,
            coordinate=at,
            shard_groups={kind_of(Plan(dp=2, strategy="full")).sharded_over: shard_group},
            replica_groups=dict.fromkeys(parameters, rest),
            linears=None if self.plan.linears is None else RECIPES[self.plan.linears],
            tp_group=tp_group or group_of(name="tp"),
            value_of=value_of,
        )
        return {name: factory.build(name, specs, stages) for name, specs in self.buffer_specs.items()}

    def make_alone(self, index: int = 0, tp: int = 0, stages: tuple[int, ...] = (0,)) -> dict[str, Unit]:
        """Those of one rank, without the others."""
        at = {"replicate": 0, "shard": index, "tp": tp}
        return self.make(at, group_of(index, self.plan.shard), group_of(name="rest"), stages)

    def make_on(self, mesh: Mesh, *, messages: bool = False) -> dict[str, Unit]:
        """Those of this rank of a mesh; with `messages` as if its ranks were on several hosts."""
        shard_group, rest = mesh.group("shard"), mesh.group(kind_of(self.plan).reduced_over)
        if messages:
            shard_group, rest = over_messages(shard_group), over_messages(rest)
        return self.make(mesh.coordinate, shard_group, rest, tp_group=mesh.group("tp"))


def over_messages(group: Group) -> Group:
    """The same ranks without shared memory."""
    if group.transport is None:
        return group
    return replace(group, transport=group.transport.over_torch())


def case_of(model: nn.Module, plan: Plan, cut: Iterable[str] = (), scaled: Collection[str] = ()) -> Case:
    """The buffers of `model`; the parameters `cut` are shared out by rows over `tp`.

    Linears cast the parameters `scaled` to float8.
    """
    parameters = dict(model.named_parameters())
    axes = {"replicate": plan.replicate, "shard": plan.shard, "tp": plan.tp}
    whole = {
        name: Layout(parameter.shape, axes, {"tp": Shard(0)} if name in cut else {})
        for name, parameter in parameters.items()
    }
    units = {
        child: [f"{child}.{name}" for name, _ in module.named_parameters()]
        for child, module in model.named_children()
    }
    known = {
        name: ModelParameter(
            named_dtype(one.dtype), one.is_floating_point(), one.requires_grad, takes_float8=name in scaled
        )
        for name, one in parameters.items()
    }
    specs = build_buffer_specs(resolve_units(plan, known, units, dict.fromkeys(units, (0,))), whole)
    return Case(model, plan, whole, specs, shard_layouts(specs, whole))


def two_layers() -> nn.Module:
    """One that is cut between rows, and one with fewer rows than ranks. The same on every rank."""
    model = nn.Sequential(nn.Linear(64, 63), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 101)
    return model


def unit_of(layer: nn.Module, index: int = 0, **plan: Any) -> Unit:
    """A layer as the unit of one rank along `shard`, without the others."""
    scaled = ["0.weight"] if "linears" in plan else []
    return case_of(nn.Sequential(layer), Plan(**plan), (), scaled).make_alone(index)["0"]


def only_buffer(unit: Unit) -> FlatBuffer:
    (buffer,) = unit.buffers
    return buffer


def live_bytes(units: Iterable[Unit]) -> int:
    """Of all memory that units hold, each storage once."""
    storages = {}
    for unit in units:
        for buffer in unit.buffers:
            flats = (buffer.whole, buffer.shard, buffer.device_copy, buffer.gradient, buffer.shard_gradient)
            for flat in flats:
                if flat is not None:
                    storages[flat.untyped_storage()._cdata] = flat.untyped_storage().nbytes()
    return sum(storages.values())
