"""Parameters as torch's own tools see them: strategies, cuts, stages; what a `DTensor` cannot say."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Cut

import plait
from plait.checkpoint.dtensor import as_dtensor, expressible
from plait.errors import LayoutError, MeshError
from plait.plan.layout import Flat, Layout, Partial, Replicate, Shard, assemble, shard

SIZES = {"layers": 1, "hidden": 16, "heads": 4, "vocab": 37, "context": 8}


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def woven(plan: plait.Plan, **sizes: int) -> Any:
    model = plait.models.llama(**SIZES | sizes)
    return plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy, seed=3)


def shown(plan: plait.Plan) -> dict[str, Any]:
    """On each rank: what each parameter is as a DTensor, the whole of it, and what was sent for that."""
    engine = woven(plan)
    groups, found = len(dist.distributed_c10d._world.pg_names), {}
    local = dict(engine.named_parameters())
    for name, parameter in engine.named_dtensors():
        assert isinstance(parameter, DTensor)
        assert not parameter.requires_grad
        shares = parameter.to_local().data_ptr() == local[name].data_ptr()
        mesh = parameter.device_mesh
        found[name] = (parameter.placements, mesh.mesh_dim_names, parameter.full_tensor(), shares)
    traffic = engine.mesh.traffic.since(engine._traffic_before)
    grown = len(dist.distributed_c10d._world.pg_names) - groups
    shards = {name: one.detach().clone() for name, one in local.items()}
    engine.mesh.close()
    return {
        "shown": found,
        "traffic": traffic,
        "groups": grown,
        "shards": shards,
        "layouts": dict(engine.layouts),
        "at": engine.mesh.coordinate,
    }


PLANS = {
    "tp": plait.Plan(tp=2, precision="fp64"),
    "dp": plait.Plan(dp=2, precision="fp64"),
    "pp": plait.Plan(pp=2, microbatches=2, precision="fp64"),
    "pp-tp": plait.Plan(pp=2, tp=2, microbatches=2, precision="fp64"),
    "dp-tp": plait.Plan(dp=2, tp=2, precision="fp64"),
    "optimizer": plait.Plan(dp=2, strategy="optimizer", precision="fp64"),
    "full": plait.Plan(dp=2, tp=2, strategy="full", precision="fp64"),
    "hybrid": plait.Plan(dp=4, replicate=2, strategy="full", precision="fp64"),
    "offload": plait.Plan(dp=2, strategy="full", offload="full", precision="fp64"),
    "context": plait.Plan(dp=2, cp=2, strategy="full", precision="fp64"),
    "context-hybrid": plait.Plan(dp=2, replicate=2, cp=2, strategy="gradients", precision="fp64"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_full_tensor_is_the_assembled_parameter(rank_pool: Any, name: str) -> None:
    plan = PLANS[name]
    ranks = rank_pool.run(shown, plan, ranks=plan.world)
    for rank in ranks:
        mates = [other for other in ranks if other["at"]["pp"] == rank["at"]["pp"]]
        for parameter, (_, names, full, _) in rank["shown"].items():
            layout = rank["layouts"][parameter]
            held = {layout.coordinate(mate["at"]): mate["shards"][parameter] for mate in mates}
            assert torch.equal(full, assemble(held, layout)), parameter
            sizes = {"replicate": plan.replicate, "shard": plan.shard, "cp": plan.cp, "tp": plan.tp}
            assert names == (tuple(axis for axis, size in sizes.items() if size > 1) or ("tp",))


def test_a_dtensor_of_an_evenly_sharded_parameter_shares_its_memory(rank_pool: Any) -> None:
    for rank in rank_pool.run(shown, PLANS["dp-tp"], ranks=4):
        placements = {name: found[0] for name, found in rank["shown"].items()}
        assert placements["blocks.0.mlp.up.weight"] == (Whole(), Cut(0))
        assert placements["blocks.0.mlp.down.weight"] == (Whole(), Cut(1))
        assert placements["head.norm.weight"] == (Whole(), Whole())
        assert placements["embedding.token.weight"] == (Whole(), Cut(0)), "19 and 18 rows, as torch cuts"
        assert all(shares for *_, shares in rank["shown"].values())
        assert rank["traffic"] == {}
        assert rank["groups"] == 0


def test_a_dtensor_of_a_flat_shard_is_gathered(rank_pool: Any) -> None:
    for rank in rank_pool.run(shown, PLANS["full"], ranks=4):
        cut = [name for name, layout in rank["layouts"].items() if isinstance(layout.placements[1], Flat)]
        gathered = [name for name in cut if not rank["shown"][name][3]]
        assert gathered
        assert rank["traffic"]["shard"]["all_gather"].calls == len(gathered)
        assert "tp" not in rank["traffic"]
        for name in gathered:
            assert rank["shown"][name][0][0] == Whole()


@pytest.mark.full
def test_only_a_rank_without_others_makes_a_group(rank_pool: Any) -> None:
    """Of itself, once, and it goes with the mesh."""

    def body(plan: plait.Plan) -> tuple[int, ...]:
        engine, names = woven(plan), dist.distributed_c10d._world.pg_names
        counts = [len(names)]
        for _ in range(2):
            assert len(dict(engine.named_dtensors())) > 0
            counts.append(len(names))
        engine.mesh.close()
        return (*(count - counts[0] for count in counts), len(names))

    assert rank_pool.run(body, PLANS["pp"], ranks=2) == [(0, 1, 1, 1)] * 2
    assert rank_pool.run(body, PLANS["dp"], ranks=2) == [(0, 0, 0, 1)] * 2
    assert rank_pool.run(body, plait.Plan(), ranks=1) == [(0, 0, 0, 1)]


def test_writing_to_a_dtensor_writes_to_the_parameter(rank_pool: Any) -> None:
    def body() -> bool:
        engine = woven(PLANS["tp"])
        for _, parameter in engine.named_dtensors():
            parameter.to_local().fill_(5)
        return all(bool((local == 5).all()) for local in engine.parameters())

    assert rank_pool.run(body, ranks=2) == [True, True]


LAYOUTS = {
    "uneven, as torch": (Layout((7, 4), {"tp": 2}, {"tp": Shard(0)}), (Cut(0),), True),
    "uneven, not as torch": (Layout((10, 4), {"tp": 4}, {"tp": Shard(0)}), (Whole(),), False),
    "fewer rows than ranks": (Layout((2, 4), {"tp": 4}, {"tp": Shard(0)}), (Cut(0),), True),
    "copies": (Layout((8, 4), {"tp": 4}, {"tp": Shard(0, copies=2)}), (Whole(),), False),
    "nested": (
        Layout((8, 4), {"shard": 2, "tp": 2}, {"shard": Shard(0), "tp": Shard(0)}),
        (Cut(0), Cut(0)),
        True,
    ),
    "nested, uneven inside": (
        Layout((6, 4), {"shard": 2, "tp": 2}, {"shard": Shard(0), "tp": Shard(0)}),
        (Cut(0), Cut(0)),
        True,
    ),
    "flat rows": (Layout((8, 3), {"shard": 4}, {"shard": Flat((0, 6, 12, 18, 24))}), (Cut(0),), True),
    "flat rows, not as torch": (
        Layout((8, 3), {"shard": 4}, {"shard": Flat((0, 3, 12, 18, 24))}),
        (Whole(),),
        False,
    ),
    "flat": (Layout((8, 3), {"shard": 4}, {"shard": Flat((0, 5, 11, 12, 24))}), (Whole(),), False),
    "flat rows inside columns": (
        Layout((8, 4), {"shard": 2, "tp": 2}, {"shard": Flat((0, 8, 16)), "tp": Shard(1)}),
        (Cut(0), Cut(1)),
        True,
    ),
    "flat rows inside rows": (
        Layout((8, 4), {"shard": 2, "tp": 2}, {"shard": Flat((0, 8, 16)), "tp": Shard(0)}),
        (Whole(), Cut(0)),
        False,
    ),
    "flat rows inside flat rows": (
        Layout((8, 3), {"shard": 2, "cp": 2}, {"shard": Flat((0, 12, 24)), "cp": Flat((0, 6, 12, 18, 24))}),
        (Cut(0), Cut(0)),
        True,
    ),
    "flat inside flat": (
        Layout((8, 3), {"shard": 2, "cp": 2}, {"shard": Flat((0, 11, 24)), "cp": Flat((0, 5, 11, 12, 24))}),
        (Whole(), Whole()),
        False,
    ),
    "flat inside flat inside columns": (
        Layout(
            (8, 4),
            {"shard": 2, "cp": 2, "tp": 2},
            {"shard": Flat((0, 7, 16)), "cp": Flat((0, 0, 7, 10, 16)), "tp": Shard(1)},
        ),
        (Whole(), Whole(), Cut(1)),
        False,
    ),
    "replicated": (Layout((8, 4), {"replicate": 2, "tp": 2}), (Whole(), Whole()), True),
    "a number": (Layout((), {"shard": 4}, {"shard": Flat((0, 0, 1, 1, 1))}), (Whole(),), False),
}
"""The placements of the `DTensor`, and whether the memory is shared."""


def placed(name: str) -> tuple[Any, bool, Tensor, Tensor]:
    layout = LAYOUTS[name][0]
    degrees = dict(zip(layout.axes, layout.degrees, strict=True))
    replicate = degrees.get("replicate", 1)
    dp = replicate * degrees.get("shard", 1)
    mesh = plait.Mesh(replicate=replicate, dp=dp, cp=degrees.get("cp", 1), tp=degrees.get("tp", 1))
    mine = shard(whole(layout.shape), layout, mesh.coordinate)
    made = as_dtensor(mine, layout, mesh)
    as_torch = distribute_tensor(whole(layout.shape), made.device_mesh, made.placements)
    assert torch.equal(as_torch.to_local(), made.to_local()), "as torch itself would cut it"
    assert as_torch.stride() == made.stride()
    return made.placements, made.to_local().data_ptr() == mine.data_ptr(), made.full_tensor(), mine


def test_a_layout_is_expressed_by_the_nearest_dtensor_placements() -> None:
    blocks = Layout((8, 4), {"shard": 2, "tp": 2}, {"tp": Shard(0, blocks=2)})
    for layout, placements, shares in [*LAYOUTS.values(), (blocks, (Whole(), Whole()), False)]:
        shown = expressible(layout)
        assert (shown.shape, shown.axis_degrees) == (layout.shape, layout.axis_degrees)
        said = [Cut(one.dim) if isinstance(one, Shard) else Whole() for one in shown.placements]
        assert tuple(said) == placements, layout
        is_flat = any(isinstance(one, Flat) for one in layout.placements)
        assert (shown == layout) is (shares and not is_flat), layout


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_gives_the_expected_dtensor_placements_and_full_tensor(rank_pool: Any, name: str) -> None:
    layout, placements, shares = LAYOUTS[name]
    for got, shared, full, mine in rank_pool.run(placed, name, ranks=prod(layout.degrees)):
        assert got == placements
        assert torch.equal(full, whole(layout.shape))
        if mine.numel():
            assert shared is shares


def test_torch_sums_the_partial_placements_of_a_dtensor(rank_pool: Any) -> None:
    def body() -> Tensor:
        mesh = plait.Mesh(tp=2)
        layout = Layout((4, 3), {"tp": 2}, {"tp": Partial()})
        return as_dtensor(whole((4, 3)) * (1 + mesh.index("tp")), layout, mesh).full_tensor()

    for full in rank_pool.run(body, ranks=2):
        assert torch.equal(full, whole((4, 3)) * 3)


def test_a_dtensor_refuses_a_tensor_of_another_shape_than_the_shard() -> None:
    with pytest.raises(LayoutError, match="is not what rank 0 holds"):
        as_dtensor(torch.ones(3), Layout((4,), {"tp": 1}, {"tp": Replicate()}), plait.Mesh())


def test_a_dtensor_without_a_process_group_is_refused() -> None:
    with pytest.raises(MeshError, match=r"plait\.launch or torchrun"):
        as_dtensor(torch.ones(4), Layout((4,), {"tp": 1}), plait.Mesh())


BLOCKED = {
    "tp": {"tp": Shard(1, blocks=3)},
    "tp and rows": {"shard": Flat((0, 12, 24)), "tp": Shard(1, blocks=3)},
    "a bias": {"tp": Shard(0, blocks=3)},
}


@pytest.mark.parametrize("name", BLOCKED)
def test_a_dtensor_of_several_linears_in_one_weight_is_gathered(rank_pool: Any, name: str) -> None:
    shape = (12,) if name == "a bias" else (4, 12)
    layout = Layout(shape, {"shard": 2, "tp": 2}, BLOCKED[name])

    def body() -> Tensor:
        mesh = plait.Mesh(plait.Plan(dp=2, tp=2, strategy="optimizer"))
        full = as_dtensor(shard(whole(shape), layout, mesh.coordinate), layout, mesh).full_tensor()
        mesh.close()
        return full

    for full in rank_pool.run(body, ranks=4):
        assert torch.equal(full, whole(shape))
