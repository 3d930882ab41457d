import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from plait.errors import CommunicationError, MeshError
from plait.plan import axes
from plait.plan.plan import Plan
from plait.ranks import Mesh, all_reduce
from plait.ranks.transport.torch_distributed import timeout_of, torch_timeout
from plait.schedules.action import Kind

degrees = some.integers(1, 3)
all_sizes = some.builds(
    lambda pp, replicate, shard, cp, tp: axes.sizes_of(
        pp=pp, dp=replicate * shard, cp=cp, tp=tp, replicate=replicate
    ),
    degrees,
    degrees,
    degrees,
    degrees,
    degrees,
)


def world_of(sizes: dict[str, int]) -> int:
    return axes.size_along("world", sizes)


@given(all_sizes)
def test_the_rank_of_a_coordinate_and_the_coordinate_of_a_rank_are_inverses(sizes):
    places = [axes.coordinate_of(rank, sizes) for rank in range(world_of(sizes))]
    assert [axes.rank_at(place, sizes) for place in places] == list(range(world_of(sizes)))
    assert [tuple(place.values()) for place in places] == sorted(tuple(place.values()) for place in places)
    assert all(tuple(place) == axes.AXES for place in places)


@given(all_sizes, some.sampled_from([*axes.AXES, *axes.COMBINED]))
def test_groups_cut_the_world_into_equal_parts(sizes, axis):
    groups = axes.groups_along(axis, sizes)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(world_of(sizes)))
    assert {len(ranks) for ranks in groups} == {axes.size_along(axis, sizes)}
    for ranks in groups:
        places = [axes.coordinate_of(rank, sizes) for rank in ranks]
        assert [axes.index_along(axis, place, sizes) for place in places] == list(range(len(ranks)))
        fixed = [{name: place[name] for name in set(place) - set(axes.axes_of(axis))} for place in places]
        assert all(held == fixed[0] for held in fixed)


@given(all_sizes, some.data())
def test_dp_combines_replicate_and_shard(sizes, data):
    dp = data.draw(some.integers(0, axes.size_along("dp", sizes) - 1))
    place = axes.split_dp({"dp": dp}, sizes)
    assert axes.index_along("dp", {"pp": 0, "cp": 0, "tp": 0, **place}, sizes) == dp


def test_tp_is_innermost_and_pp_outermost():
    sizes = axes.sizes_of(pp=2, dp=4, tp=2, replicate=2)
    assert axes.groups_along("tp", sizes)[:2] == [(0, 1), (2, 3)]
    assert axes.groups_along("shard", sizes)[:2] == [(0, 2), (1, 3)]
    assert axes.groups_along("replicate", sizes)[:2] == [(0, 4), (1, 5)]
    assert axes.groups_along("dp", sizes)[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert axes.groups_along("pp", sizes)[:2] == [(0, 8), (1, 9)]


def test_context_parallelism_lies_between_shard_and_tp():
    sizes = axes.sizes_of(dp=4, cp=2, tp=2, replicate=2)
    assert axes.groups_along("cp", sizes)[:2] == [(0, 2), (1, 3)]
    assert axes.groups_along("shard_cp", sizes)[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert axes.groups_along("dp_cp", sizes)[0] == tuple(range(0, 16, 2))


def test_groups_over_tokens_are_those_over_sequences_without_context_parallelism(thread_ranks):
    def body():
        one, two = Mesh(dp=4), Mesh(dp=2, cp=2)
        return one.group("dp_cp") is one.group("dp"), two.group("dp_cp").name, two.group("shard_cp").ranks

    assert thread_ranks.run(body, ranks=4) == [(True, "dp_cp", (0, 1, 2, 3))] * 4


def test_a_mesh_of_one_needs_no_backend():
    mesh = Mesh()
    assert (mesh.rank, mesh.world, mesh.device) == (0, 1, torch.device("cpu"))
    assert mesh.sizes == dict.fromkeys(axes.AXES, 1)
    assert mesh.coordinate == dict.fromkeys(axes.AXES, 0)
    for group in (mesh.group("dp"), mesh.group("world")):
        assert (group.ranks, group.index, group.transport) == ((0,), 0, None)
    assert repr(mesh) == "Mesh(pp=1, replicate=1, shard=1, cp=1, tp=1; rank 0)"


REFUSED = [
    (lambda: Mesh(pp=2, tp=2), ["needs 4 ranks", "the world has 1", "plait.launch(fn, ranks=4)"]),
    (lambda: Mesh(Plan(), pp=2), ["a plan and degrees"]),
    (lambda: Mesh(dp=4, replicate=3), ["replicate = 3 does not divide dp = 4"]),
    (lambda: Mesh(tp=0), ["tp is 0"]),
    (lambda: Mesh(dp=0), ["the mesh's dp is 0"]),
    (lambda: Mesh(replicate=0), ["replicate is 0"]),
    (lambda: Mesh(tp=True), ["tp is True"]),
    (lambda: Mesh(device="gpu"), ["the mesh's device is 'gpu' (", "give cpu, cuda or cuda:0"]),
    (lambda: Mesh().group("rows"), ["no axis 'rows'", "pp, replicate, shard, cp, tp, dp, shard_cp, "]),
    (lambda: Mesh().size("rows"), ["no axis 'rows'"]),
    (lambda: Mesh().coordinate_of(1), ["no rank 1"]),
    (lambda: Mesh().rank_at(tp=1), ["no tp = 1"]),
    (lambda: Mesh().rank_at(rows=0), ["no axis 'rows'"]),
    (lambda: Mesh().rank_at(dp=0, shard=0), ["dp and also"]),
    (lambda: Mesh().new_group([[0, 0]], "pairs"), ["groups of pairs"]),
    (lambda: Mesh().new_group([[1]], "pairs"), ["rank from 0 to 0"]),
    (lambda: Mesh().check_plan(Plan(tp=2)), ["tp = 2 but the mesh has tp = 1"]),
    (
        lambda: Mesh().check_plan(Plan(dp=4, replicate=2)),
        ["replicate = 2 but the mesh has replicate = 1"],
    ),
]


def test_mesh_errors_name_the_values_and_the_remedy():
    for make, parts in REFUSED:
        with pytest.raises(MeshError) as caught:
            make()
        assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_mesh_of_eight_ranks_has_groups_along_every_axis(rank_pool):
    def body():
        mesh = Mesh(Plan(pp=2, dp=4, replicate=2))
        channels = mesh.channel_groups([(0, 1, Kind.F), (1, 0, Kind.I)])
        groups = [*(mesh.group(axis) for axis in (*axes.AXES, "dp", "world")), *channels.values()]
        made = [group.transport.process_group for group in groups if group.transport is not None]
        default = torch.distributed.group.WORLD
        return {
            "text": repr(mesh),
            "ranks": [group.ranks for group in groups],
            "indices": [group.index for group in groups],
            "names": [group.name for group in groups],
            "distinct": len({id(group) for group in made}) == 7 and default not in made,
            "dp": (mesh.index("dp"), mesh.size("dp")),
            "left of me": mesh.rank_at(pp=0),
            "dp 0 of mine": mesh.rank_at(dp=0),
        }

    results = rank_pool.run(body, ranks=8)
    assert results[7] == {
        "text": "Mesh(pp=2, replicate=2, shard=2, cp=1, tp=1; rank 7 at pp=1 replicate=1 shard=1)",
        "ranks": [(3, 7), (5, 7), (6, 7), (7,), (7,), (4, 5, 6, 7), tuple(range(8)), (3, 7), (7, 3)],
        "indices": [1, 1, 1, 0, 0, 3, 7, 1, 0],
        "names": ["pp", "replicate", "shard", "cp", "tp", "dp", "world", "pp", "pp"],
        "distinct": True,
        "dp": (3, 4),
        "left of me": 3,
        "dp 0 of mine": 4,
    }
    assert all(result["distinct"] for result in results)


def test_a_rank_has_the_channels_that_it_uses_and_makes_them_once(thread_ranks):
    def body():
        mesh = Mesh(pp=3)
        first = mesh.channel_groups([(0, 1, Kind.F), (1, 2, Kind.F)])
        again = mesh.channel_groups([(0, 1, Kind.F), (0, 1, Kind.I), (2, 0, Kind.F)])
        return {str(channel): group.ranks for channel, group in again.items()}, [
            again[channel] is group for channel, group in first.items() if channel in again
        ]

    assert thread_ranks.run(body, ranks=3) == [
        ({str((0, 1, Kind.F)): (0, 1), str((0, 1, Kind.I)): (0, 1), str((2, 0, Kind.F)): (2, 0)}, [True]),
        ({str((0, 1, Kind.F)): (0, 1), str((0, 1, Kind.I)): (0, 1)}, [True]),
        ({str((2, 0, Kind.F)): (2, 0)}, []),
    ]


def test_new_groups_are_disjoint_and_keep_their_order(rank_pool):
    def body():
        mesh = Mesh(pp=4)
        group = mesh.new_group([[2, 0], [3]], "ties")
        if group is None:
            return None
        total = all_reduce(torch.tensor([10.0**mesh.rank]), group).wait().item()
        return group.ranks, group.index, total, mesh.traffic.snapshot().keys()

    assert rank_pool.run(body, ranks=4) == [
        ((2, 0), 1, 101.0, {"ties"}),
        None,
        ((2, 0), 0, 101.0, {"ties"}),
        ((3,), 0, 1000.0, set()),
    ]


def test_a_rank_that_does_not_come_is_named(rank_pool):
    def body():
        mesh = Mesh(dp=2, timeout=0.5)
        store = dist.distributed_c10d._get_default_store()
        if mesh.rank == 1:
            store.wait(["given up"])
            return ""
        with pytest.raises(CommunicationError) as caught:
            mesh.new_group([[0, 1]], "some")
        store.set("given up", "yes")
        return str(caught.value)

    told = rank_pool.run(body, ranks=2)[0]
    assert told.startswith("rank 0 waits for rank 1 to make the group some of the mesh: "), told
    assert told.endswith("(see what that rank is doing, or give the mesh more time).")


def test_closing_a_mesh_closes_its_connections(rank_pool):
    def body():
        import os

        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            mesh = Mesh(dp=2, tp=2)
            all_reduce(torch.ones(1), mesh.group("world")).wait()
            mesh.close()
        del mesh
        return len(os.listdir("/proc/self/fd")) <= before

    assert rank_pool.run(body, ranks=4) == [True] * 4


def test_the_world_knows_the_groups_of_a_mesh(rank_pool):
    """What is relied on to end all groups at the same time: torch has no public list."""

    def body():
        import torch.distributed as dist

        group = Mesh(dp=2).group("dp").transport.process_group
        return group in dist.distributed_c10d._world.pg_names and dist.group.WORLD is not group

    assert rank_pool.run(body, ranks=2) == [True, True]


def test_a_mesh_has_the_timeout_of_its_world_unless_it_is_given_one(rank_pool):
    def body():
        return [Mesh(dp=2).timeout, Mesh(dp=2, timeout=5).timeout, Mesh(alone=True).timeout]

    assert rank_pool.run(body, ranks=2) == [[60.0, 5.0, 600.0]] * 2, "60 s is the pool's"
    assert Mesh().timeout == 600.0


def test_the_timeout_of_a_world_is_none_where_its_backend_does_not_tell():
    class WithoutOptions:
        @property
        def options(self):
            raise RuntimeError("not implemented")

    for backend, expected in (
        (SimpleNamespace(), None),
        (WithoutOptions(), None),
        (SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=33))), 33.0),
        (SimpleNamespace(options=SimpleNamespace(_timeout=torch_timeout(math.inf))), math.inf),
    ):
        group = SimpleNamespace(_get_backend=lambda device, backend=backend: backend)
        assert timeout_of(group, torch.device("cpu")) == expected
