"""Who holds and who counts a parameter, over pp=2, dp=2, tp=2 (rank = 4·pp + 2·dp + tp)."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch

from plait.engine.blueprint import Blueprint, build_blueprint
from plait.engine.sharding.gradient_norm import counted_parameters
from plait.engine.sharding.unit import reduction_groups, reduction_ranks
from plait.models.gpt2 import gpt2
from plait.models.llama import llama
from plait.plan.layout import Flat, Layout, Shard
from plait.plan.parameter_units import ModelParameter, kind_of
from plait.plan.plan import Plan
from plait.ranks import Mesh, all_reduce

AXES = {"replicate": 1, "shard": 2, "tp": 2}
WHOLE, CUT, COPIED = (Layout((4,), AXES, at) for at in ({}, {"tp": Shard(0)}, {"tp": Shard(0, copies=2)}))
HOLDERS = {
    "first.whole": (0,),
    "first.cut": (0,),
    "last.copied": (1,),
    "last.cut": (1,),
    "tied.cut": (0, 1),
    "tied.copied": (0, 1),
    "tied.whole": (0, 1),
}
KINDS = {
    name: kind_of(Plan(dp=2), ModelParameter(summands=2 if name.endswith("copied") else 1))
    for name in HOLDERS
}
LAYOUTS = {name: {"whole": WHOLE, "cut": CUT, "copied": COPIED}[name.partition(".")[2]] for name in HOLDERS}
FAMILIES = {
    "gpt2": partial(gpt2, vocab=37, context=8, layers=2, hidden=24, heads=4),
    "llama": partial(llama, vocab=37, context=8, layers=2, hidden=24, heads=4, kv_heads=2),
    "llama-one": partial(llama, vocab=37, context=8, layers=2, hidden=24, heads=4, kv_heads=1),
}


def over_cube(thread_ranks: Any, body: Any) -> list[Any]:
    """`body(mesh)` on each of the 8 ranks."""
    return thread_ranks.run(lambda: body(Mesh(pp=2, dp=2, tp=2)), ranks=8)


def test_the_ranks_that_hold_the_same_shard_are_listed(thread_ranks):
    def body(mesh: Mesh) -> Any:
        return (
            reduction_ranks([(0,), (1,)], 2, mesh),
            reduction_ranks([(0, 1)], 1, mesh),
            reduction_ranks([(0, 1)], 2, mesh),
        )

    for stages, tied, both in over_cube(thread_ranks, body):
        assert stages == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert tied == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert both == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_gradients_are_summed_over_holders_of_a_shard_with_other_data(thread_ranks):
    def body(mesh: Mesh) -> dict[str, Any]:
        groups = reduction_groups(HOLDERS, KINDS, mesh)
        mine = [name for name, stages in HOLDERS.items() if mesh.index("pp") in stages]
        return {name: (groups[name].name, groups[name].ranks) for name in mine}

    for rank, groups in enumerate(over_cube(thread_ranks, body)):
        pp, tp = rank // 4, rank % 2
        data = tuple(4 * pp + 2 * dp + tp for dp in range(2))
        tied = ("tie", tuple(range(tp, 8, 2)))
        wanted = {"tied.cut": tied, "tied.whole": tied, "tied.copied": ("tie", tuple(range(8)))}
        if pp == 0:
            wanted |= {"first.whole": ("dp", data), "first.cut": ("dp", data)}
        else:
            wanted |= {"last.copied": ("copies", (4, 5, 6, 7)), "last.cut": ("dp", data)}
        assert groups == wanted


def test_reduction_groups_sum_over_exactly_their_ranks(thread_ranks):
    """Each rank gives its number: what comes is the sum over the group, on all of it."""

    def body(mesh: Mesh) -> dict[str, float]:
        groups = reduction_groups(HOLDERS, KINDS, mesh)
        own = torch.tensor(float(mesh.rank))
        mine = [name for name, stages in HOLDERS.items() if mesh.index("pp") in stages]
        return {name: all_reduce(own.clone(), groups[name]).wait().item() for name in mine}

    for rank, sums in enumerate(over_cube(thread_ranks, body)):
        pp, tp = rank // 4, rank % 2
        assert sums["tied.copied"] == 28
        assert sums["tied.cut"] == 12 + 4 * tp
        assert sums["first.cut" if pp == 0 else "last.cut"] == 8 * pp + 2 + 2 * tp
        assert pp == 0 or sums["last.copied"] == 22


def test_parameters_held_by_the_same_ranks_share_a_group(thread_ranks):
    def body(mesh: Mesh) -> Any:
        groups = reduction_groups(HOLDERS, KINDS, mesh)
        return groups["tied.cut"] is groups["tied.whole"], groups["first.cut"] is mesh.group("dp")

    assert over_cube(thread_ranks, body) == [(True, True)] * 8


def test_each_parameter_counts_on_exactly_one_rank_that_holds_it(thread_ranks):
    counted = over_cube(thread_ranks, lambda mesh: counted_parameters(HOLDERS, LAYOUTS, mesh, "model"))
    first = {"first.cut", "tied.cut"}
    for dp in range(2):
        assert counted[2 * dp] == first | {"first.whole", "tied.whole", "tied.copied"}
        assert counted[2 * dp + 1] == first
        assert counted[4 + 2 * dp] == {"last.cut", "last.copied"}
        assert counted[4 + 2 * dp + 1] == {"last.cut"}


def over_hybrid(thread_ranks: Any, body: Any) -> list[Any]:
    """`body(mesh)` on each of 8 ranks: rank = 4·pp + 2·replicate + shard."""
    return thread_ranks.run(lambda: body(Mesh(pp=2, dp=4, replicate=2)), ranks=8)


def test_the_ranks_that_hold_the_same_shard_over_shard_and_tp_are_listed(thread_ranks):
    def body(mesh: Mesh) -> Any:
        return reduction_ranks([(0,), (1,)], 1, mesh, "replicate"), reduction_ranks(
            [(0, 1)], 1, mesh, "replicate"
        )

    for stages, tied in over_hybrid(thread_ranks, body):
        assert stages == [[0, 2], [1, 3], [4, 6], [5, 7]]
        assert tied == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_shards_are_summed_over_the_ranks_that_hold_the_same(thread_ranks):
    axes = {"replicate": 2, "shard": 2, "tp": 1}
    shard = Layout((4,), axes, {"shard": Flat((0, 2, 4))})
    owners = {"first": (0,), "last": (1,), "tied": (0, 1)}
    kind = kind_of(Plan(dp=4, replicate=2, strategy="full"))

    def body(mesh: Mesh) -> Any:
        groups = reduction_groups(owners, dict.fromkeys(owners, kind), mesh)
        counted = counted_parameters(owners, dict.fromkeys(owners, shard), mesh)
        return {name: (groups[name].name, groups[name].ranks) for name in ("first", "tied")}, counted

    for rank, (groups, counted) in enumerate(over_hybrid(thread_ranks, body)):
        pp, replicate, shard = rank // 4, rank // 2 % 2, rank % 2
        assert groups == {
            "first": ("replicate", (4 * pp + shard, 4 * pp + 2 + shard)),
            "tied": ("tie", tuple(range(shard, 8, 2))),
        }
        mine = ({"last"} if pp else {"first", "tied"}) if replicate == 0 else set()
        assert counted == mine


Model = tuple[str, bool]
"""A family, and whether its table is tied."""
MODELS = tuple(product(FAMILIES, (True, False)))


def counted_of_models(plan: Plan, blueprints: dict[Model, Blueprint]) -> tuple[int, dict[Model, int]]:
    """This rank's place along `dp`, and how many elements of each model count as its."""
    mesh, elements = Mesh(plan), {}
    for model, blueprint in blueprints.items():
        counted = counted_parameters(blueprint.owners, blueprint.layouts, mesh, blueprint.norm_axis)
        elements[model] = sum(prod(blueprint.layouts[name].local_shape(mesh.coordinate)) for name in counted)
    return mesh.index("dp"), elements


def counted_by_ranks(thread_ranks: Any, plan: Plan) -> list[tuple[int, dict[Model, int]]]:
    """The same of all ranks, for which there is one blueprint of each model."""
    blueprints = {
        (family, tied): build_blueprint(FAMILIES[family](tied=tied), plan) for family, tied in MODELS
    }
    return thread_ranks.run(counted_of_models, plan, blueprints, ranks=plan.world)


def elements_of(family: str, tied: bool) -> int:
    return sum(parameter.numel() for parameter in FAMILIES[family](tied=tied).parameters())


@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "tp": 4}, {"dp": 2, "tp": 4}])
def test_each_element_of_a_model_counts_once_over_pp_and_tp(thread_ranks, degrees):
    found = counted_by_ranks(thread_ranks, Plan(**degrees))
    for family, tied in MODELS:
        for dp in range(degrees.get("dp", 1)):
            counted = sum(counts[family, tied] for place, counts in found if place == dp)
            assert counted == elements_of(family, tied)


@pytest.mark.parametrize(
    "degrees", [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 4, "tp": 2, "replicate": 2}, {"dp": 8}], ids=str
)
def test_each_element_of_what_is_cut_over_shard_counts_once_over_the_world(thread_ranks, degrees):
    found = counted_by_ranks(thread_ranks, Plan(**degrees, strategy="optimizer"))
    for family, tied in MODELS:
        assert sum(counts[family, tied] for _, counts in found) == elements_of(family, tied)
