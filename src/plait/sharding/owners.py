"""Owners of a parameter: the ranks that hold it and sum its gradient; one adds it to the gradient norm.

A rank of `pp` holds the parameters of its stages; a tied one is held by several. Along `tp` a rank holds a
piece of its own, a piece that neighbours hold too, or all of a parameter, whose gradient each of them has, or
each a summand of. Along `dp` and `cp` all hold the same, or, where it is sharded, along `replicate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from plait.comm.coordinates import COMBINED, axes_of
from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.layout import Flat, Layout
from plait.plan import Plan
from plait.schedules.lowering_spec import LayerIndex

Owners: TypeAlias = Mapping[str, tuple[int, ...]]
"""For each parameter the ranks of `pp` that hold it, in order; the first adds it to the gradient norm."""


def pp_owners(
    units: Mapping[str, str], users: Mapping[str, Iterable[LayerIndex]], rank_of: Sequence[int]
) -> Owners:
    """Return the ranks of `pp` that hold each parameter: those that run a layer which uses it."""
    ranks = {unit: tuple(sorted({rank_of[at.stage] for at in places})) for unit, places in users.items()}
    return {name: ranks[unit] for name, unit in units.items()}


def reduction_axis(plan: Plan) -> str:
    """Return the mesh axis of the gradients' all-reduce: `replicate` after a reduce-scatter, else `dp_cp`."""
    return "replicate" if plan.shards else "dp_cp"


def replica_count(name: str, owners: Owners, summed: Mapping[str, int], plan: Plan) -> int:
    """Return the number of ranks over which the gradient of parameter `name` is all-reduced."""
    alike = plan.replicate if reduction_axis(plan) == "replicate" else plan.dp * plan.cp
    return len(owners[name]) * alike * summed[name]


def reduction_groups(
    owners: Owners, summed: Mapping[str, int], mesh: Mesh, axis: str = "dp_cp"
) -> dict[str, Group]:
    """Return for each parameter of this rank the process group over which its gradient is all-reduced.

    The ranks along `axis` (see `reduction_axis`); for a parameter tied across stages also those of each rank
    of `pp` that holds it; and along `tp` as many neighbours as `summed` gives.
    """
    groups: dict[str, Group] = {}
    known: dict[tuple[tuple[int, ...], int], Group | None] = {}
    for name, stages in owners.items():
        summands = summed[name]
        tied = len(stages) > 1
        key = (stages if tied else (), summands)
        if key == ((), 1):
            known[key] = mesh.group(axis)
        elif key not in known:
            together = [stages] if tied else [(stage,) for stage in range(mesh.size("pp"))]
            ranks = reduction_ranks(together, summands, mesh, axis)
            known[key] = mesh.new_group(ranks, "tie" if tied else "copies")
        group = known[key]
        if group is not None:
            groups[name] = group
    return groups


def reduction_ranks(
    together: Iterable[Sequence[int]], summands: int, mesh: Mesh, axis: str = "dp_cp"
) -> list[list[int]]:
    """Return each all-reduce group's global ranks; `together`: sets of `pp` ranks that are in one group.

    One group for each set of ranks of `pp` and each `summands` neighbours along `tp`; and, where `axis` is
    `replicate`, for each index along `shard` and `cp`.
    """
    along = axes_of(axis)
    apart = [other for other in COMBINED["dp_cp"] if other not in along]
    return [
        [
            mesh.rank_at(pp=pp, tp=tp, **place, **fixed)
            for pp in stages
            for place in _places(along, mesh)
            for tp in range(first, first + summands)
        ]
        for stages in together
        for fixed in _places(apart, mesh)
        for first in range(0, mesh.size("tp"), summands)
    ]


def _places(axes: Sequence[str], mesh: Mesh) -> Iterator[dict[str, int]]:
    """Yield all coordinates along `axes`, row-major."""
    for indexes in product(*(range(mesh.size(axis)) for axis in axes)):
        yield dict(zip(axes, indexes, strict=True))


def counted_parameters(owners: Owners, layouts: Mapping[str, Layout], mesh: Mesh) -> frozenset[str]:
    """Return the parameters whose gradients this rank adds to the gradient norm: each piece is added once.

    Those that are whole along `dp` count for all of its ranks: a sum over them is one over `model`.
    """

    def counts(name: str) -> bool:
        layout = layouts[name]
        is_cut = any(isinstance(placement, Flat) for placement in layout.placements)
        if owners[name][0] != mesh.index("pp"):
            return False
        owner = dict(zip(layout.axes, layout.owner(mesh.coordinate), strict=True))
        return all(
            owner[axis] == mesh.index(axis) for axis in layout.axes if is_cut or axis not in COMBINED["dp"]
        )

    return frozenset(name for name in owners if counts(name))
