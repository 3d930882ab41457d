"""Meshes of one's own axes: places, groups, sums along them, and the same mesh as torch knows it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plait.errors import LayoutError, MeshError
from plait.plan.layout import Flat, Layout, Partial, Replicate, Shard, shard
from plait.ranks import GridMesh, Mesh, all_gather, all_reduce
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor import full_tensor, redistribute


def of_two_by_three() -> dict[str, Any]:
    mesh = GridMesh(rows=2, columns=3, timeout=math.inf)  # no limit
    mine = torch.tensor([10.0**mesh.rank], dtype=torch.float64)
    groups = [mesh.group(axis) for axis in ("rows", "columns", "world")]
    pair = GridMesh(planes=3, depth=2).neighbours("planes", 1, "alone")
    return {
        "text": repr(mesh),
        "place": mesh.coordinate,
        "ranks": [group.ranks for group in groups],
        "sums": [all_reduce(mine.clone(), group).wait().item() for group in groups],
        "row": all_gather(mine, mesh.group("columns")).wait().tolist(),
        "above": mesh.rank_at(rows=0),
        "sizes": (mesh.size("rows"), mesh.size("world"), mesh.index("world")),
        "traffic": {axis: kinds.keys() for axis, kinds in mesh.traffic.snapshot().items()},
        "alone": pair.ranks,
    }


def test_a_grid_has_a_group_along_every_axis(rank_pool: RankPool) -> None:
    found = rank_pool.run(of_two_by_three, ranks=6)
    assert found[4] == {
        "text": "GridMesh(rows=2, columns=3; rank 4 at rows=1 columns=1)",
        "place": {"rows": 1, "columns": 1},
        "ranks": [(1, 4), (3, 4, 5), tuple(range(6))],
        "sums": [1e1 + 1e4, 1e3 + 1e4 + 1e5, 111_111.0],
        "row": [1e3, 1e4, 1e5],
        "above": 1,
        "sizes": (2, 6, 4),
        "traffic": {
            "rows": {"all_reduce"},
            "columns": {"all_reduce", "all_gather"},
            "world": {"all_reduce"},
        },
        "alone": (4,),
    }


def as_torch_has_it() -> bool:
    """Partial along one axis and cut along the other, there and back, by DTensor and by plait."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    mesh, axes = GridMesh(rows=2, columns=2), {"rows": 2, "columns": 2}
    theirs = mesh.device_mesh(("rows", "columns"))
    assert theirs.mesh.tolist() == [[0, 1], [2, 3]]
    assert theirs.mesh_dim_names == ("rows", "columns")
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    source = Layout((4, 6), axes, {"rows": Partial(), "columns": Shard(1)})
    target = Layout((4, 6), axes, {"rows": Shard(0), "columns": Replicate()})
    cut = Layout((4, 6), axes, {"columns": Shard(1)})
    mine = shard(whole, cut, mesh.coordinate) * (mesh.index("rows") + 1)
    ours = redistribute(mine, source, target, mesh)
    known = DTensor.from_local(mine, theirs, [TorchPartial(), TorchShard(1)], run_check=False)
    other = known.redistribute(theirs, [TorchShard(0), TorchReplicate()]).to_local()
    return torch.equal(ours, other) and torch.equal(ours, 3 * shard(whole, target, mesh.coordinate))


def test_torch_and_dtensor_see_the_same_grid(rank_pool: RankPool) -> None:
    assert rank_pool.run(as_torch_has_it, ranks=4) == [True] * 4


def wholes_in_a_rank() -> list[bool]:
    mesh, axes = GridMesh(rows=2, columns=2), {"rows": 2, "columns": 2}
    whole = torch.arange(48.0).view(8, 6)
    layouts = [
        Layout((8, 6), axes, {"rows": Shard(0), "columns": Shard(1)}),
        Layout((8, 6), axes, {"rows": Flat((0, 7, 24)), "columns": Shard(0)}),
        Layout((8, 6), axes, {"columns": Shard(0, blocks=2)}),
        Layout((8, 6), axes, {"rows": Shard(1), "columns": Shard(0, blocks=2)}),
        Layout((8, 6), axes),
    ]
    ranges = [shard(whole, layout, mesh.coordinate) for layout in layouts]
    return [
        torch.equal(full_tensor(one, layout, mesh), whole)
        for one, layout in zip(ranges, layouts, strict=True)
    ]


def test_every_rank_gets_the_whole_of_a_tensor(rank_pool: RankPool) -> None:
    assert rank_pool.run(wholes_in_a_rank, ranks=4) == [[True] * 5] * 4


def neighbours_in_a_rank() -> list[tuple[str, tuple[int, ...], int]]:
    mesh = GridMesh(rows=2, columns=4)
    groups = [*(mesh.neighbours("columns", size) for size in (1, 2, 4)), mesh.neighbours("rows", 2, "mine")]
    return [(group.name, group.ranks, group.index) for group in groups]


def test_grid_neighbours_are_consecutive_ranks_of_an_axis(rank_pool: RankPool) -> None:
    found = rank_pool.run(neighbours_in_a_rank, ranks=8)
    assert found[6] == [
        ("copies", (6,), 0),
        ("copies", (6, 7), 0),
        ("copies", (4, 5, 6, 7), 2),
        ("mine", (2, 6), 1),
    ]


def test_a_mesh_is_the_grid_of_a_plans_axes() -> None:
    mesh = Mesh()
    assert isinstance(mesh, GridMesh)
    assert (mesh.axes_of("dp"), mesh.axes_of("tp")) == (("replicate", "shard"), ("tp",))
    grid = GridMesh(depth=1)
    assert (grid.axes_of("world"), grid.coordinate, repr(grid)) == (
        ("depth",),
        {"depth": 0},
        "GridMesh(depth=1; rank 0)",
    )


REFUSED: list[tuple[Any, list[str]]] = [
    (lambda: GridMesh(), ["axes are none", "at least one"]),
    (lambda: GridMesh(world=1), ["axes are world", "none of the name world"]),
    (lambda: GridMesh(rows=0), ["rows is 0"]),
    (lambda: GridMesh(rows=2, columns=3), ["needs 6 ranks (rows 2 × columns 3)", "the world has 1"]),
    (lambda: GridMesh(rows=1).group("dp"), ["no axis 'dp'", "choose one of rows, world"]),
    (lambda: GridMesh(rows=1).rank_at(columns=0), ["no axis 'columns'", "choose among rows."]),
    (lambda: GridMesh(rows=1).rank_at(rows=1), ["no rows = 1"]),
    (lambda: GridMesh(rows=1).neighbours("rows", 2), ["1 ranks along rows do not divide"]),
    (lambda: GridMesh(rows=1).neighbours("rows", 0), ["is 0: give a whole number"]),
    (lambda: GridMesh(rows=1, timeout=0), ["timeout is 0"]),
    (lambda: GridMesh(rows=1, alone=1), ["alone is 1"]),
    (lambda: GridMesh(rows=1, guarded=1), ["guarded is 1"]),
]


def test_grid_mesh_errors_name_the_values_and_the_remedy() -> None:
    for make, parts in REFUSED:
        with pytest.raises(MeshError) as caught:
            make()
        assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_layouts_of_other_axes_are_refused() -> None:
    layout = Layout((2, 2), {"rows": 2}, {"rows": Shard(0)})
    with pytest.raises(LayoutError, match="does not fit GridMesh"):
        redistribute(torch.ones(1, 2), layout, Layout((2, 2), {"rows": 2}), GridMesh(rows=1))
