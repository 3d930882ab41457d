"""Who holds a parameter: the ranks over which its gradient is summed, and the rank that it counts for.

A rank of `pp` holds the parameters of its stages; a tied one is held by several. Along `tp` a rank holds a
piece of its own, a piece that neighbours hold too, or all of a parameter, whose gradient each of them has, or
each a summand of. Along `dp` all hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.layout import Flat, Layout

Owners = Mapping[str, tuple[int, ...]]
"""For each parameter the ranks of `pp` that hold it, in order; it counts for the first."""


def reduction_groups(
    owners: Owners, summed: Mapping[str, int], mesh: Mesh, axis: str = "dp"
) -> dict[str, Group]:
    """For each parameter of this rank, the ranks over which its gradient is summed, once.

    The ranks of `axis` (`dp`, or `replicate` for what is cut over `shard`); for a parameter tied across
    stages also those of each rank of `pp` that holds it; and along `tp` as many neighbours as `summed` says.
    """
    groups: dict[str, Group] = {}
    made: dict[tuple[tuple[int, ...], int], Group | None] = {}
    for name, stages in owners.items():
        summands = summed[name]
        tied = len(stages) > 1
        key = (stages if tied else (), summands)
        if key == ((), 1):
            made[key] = mesh.group(axis)
        elif key not in made:
            together = [stages] if tied else [(stage,) for stage in range(mesh.size("pp"))]
            made[key] = mesh.new_group(
                ranks_holding(together, summands, mesh, axis), "tie" if tied else "copies"
            )
        group = made[key]
        if group is not None:
            groups[name] = group
    return groups


def ranks_holding(
    together: Iterable[Sequence[int]], summands: int, mesh: Mesh, axis: str = "dp"
) -> list[list[int]]:
    """Global ranks with the same piece, or with a summand each.

    For each set of ranks of `pp`, by `summands` neighbours along `tp`. Along `dp`, all of them or
    (`axis` `replicate`) those with the same index along `shard`.
    """
    apart = [{}] if axis == "dp" else [{"shard": index} for index in range(mesh.size("shard"))]
    return [
        [
            mesh.rank_at(pp=pp, tp=tp, **{axis: index}, **fixed)
            for pp in stages
            for index in range(mesh.size(axis))
            for tp in range(first, first + summands)
        ]
        for stages in together
        for fixed in apart
        for first in range(0, mesh.size("tp"), summands)
    ]


def counted_parameters(owners: Owners, layouts: Mapping[str, Layout], mesh: Mesh) -> frozenset[str]:
    """The parameters that count as this rank's, so that each piece counts once over the ranks of the world.

    Those that are whole along `dp` count for all of its ranks: a sum over them is one over `pp` and `tp`.
    """
    here, tp = mesh.index("pp"), mesh.index("tp")

    def owns(name: str) -> bool:
        layout = layouts[name]
        if isinstance(layout.placements[layout.axes.index("shard")], Flat) and mesh.index("replicate"):
            return False
        first = layout.owner(mesh.coordinate)[layout.axes.index("tp")]
        return owners[name][0] == here and first == tp

    return frozenset(name for name in owners if owns(name))
