"""Owners of a parameter: the ranks that hold it and sum its gradient; one adds it to the gradient norm.

A rank of `pp` holds the parameters of its stages; a tied one is held by several. Along `tp` a rank holds a
shard of its own, a shard that neighbours hold too, or all of a parameter, whose gradient each of them has, or
each a summand of. Along `dp` and `cp` all hold the same, or, where it is sharded, along `replicate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from plait.plan.axes import DATA_AXES, axes_of
from plait.plan.layout.layout import Layout
from plait.plan.parameter_units import BufferKind
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh

Owners: TypeAlias = Mapping[str, tuple[int, ...]]
"""For each parameter the ranks of `pp` that hold it, in order; the first adds it to the gradient norm."""


def reduction_groups(owners: Owners, kinds: Mapping[str, BufferKind], mesh: Mesh) -> dict[str, Group]:
    """Return for each parameter of this rank the process group over which its gradient is all-reduced.

    The ranks along its kind's `reduced_over`; for a parameter tied across stages also those of each rank of
    `pp` that holds it; and along `tp` as many as its kind's `reduced_neighbours`.
    """
    groups: dict[str, Group] = {}
    known: dict[tuple[tuple[int, ...], tuple[str, ...], int], Group | None] = {}
    for name, stages in owners.items():
        axes, summands = kinds[name].reduced_over, kinds[name].reduced_neighbours
        tied = len(stages) > 1
        key = (stages if tied else (), axes, summands)
        if not tied and summands == 1:
            known[key] = mesh.group(axes)
        elif key not in known:
            together = [stages] if tied else [(stage,) for stage in range(mesh.size("pp"))]
            ranks = reduction_ranks(together, summands, mesh, axes)
            known[key] = mesh.new_group(ranks, "tie" if tied else "copies")
        group = known[key]
        if group is not None:
            groups[name] = group
    return groups


def reduction_ranks(
    together: Iterable[Sequence[int]], summands: int, mesh: Mesh, axis: str | Sequence[str] = "dp_cp"
) -> list[list[int]]:
    """Return each all-reduce group's global ranks; `together`: sets of `pp` ranks that are in one group.

    One group for each set of ranks of `pp`, each `summands` neighbours along `tp`, and each index along the
    axes of `dp_cp` that `axis` does not have.
    """
    along = axes_of(axis)
    apart = [other for other in DATA_AXES if other not in along]
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


def counted_parameters(
    owners: Owners, layouts: Mapping[str, Layout], mesh: Mesh, axis: str = "world"
) -> frozenset[str]:
    """Return the parameters whose gradients this rank adds to the gradient norm: each shard is added once.

    Once among the ranks along `axis`, over which the norm is summed: `world`, or `model`, whose ranks have
    all parameters among them where none is sharded.
    """
    along = mesh.axes_of(axis)

    def counts(name: str) -> bool:
        layout = layouts[name]
        owner = dict(zip(layout.axes, layout.owner(mesh.coordinate), strict=True))
        is_first = owners[name][0] == mesh.index("pp")
        return is_first and all(owner[one] == mesh.index(one) for one in layout.axes if one in along)

    return frozenset(name for name in owners if counts(name))
