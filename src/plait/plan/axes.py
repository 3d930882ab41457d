"""The axes of a mesh: their names, order and degrees, and the ranks and coordinates along them.

`sizes` maps each axis to its number of ranks, outermost first: row-major, so that consecutive ranks are
neighbours along the last axis. The axes may be those of a plan, or any others; `world` combines all of them.

A plan that divides experts arranges the same ranks in two grids; `sizes` has the axes of both:

    dense parameters       pp   replicate   shard   cp   tp
    experts                pp   replicate   edp     ep   etp

Each rank has an index along the axes of both grids. `etp`, then `ep`, take the innermost ranks: those of
`tp`, then `cp`, then `shard`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from plait.errors import MeshError
from plait.plan.argument_checks import require_whole
from plait.plan.plan import Plan

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""The axes of a plan."""
DENSE_ONLY = ("shard", "cp", "tp")
EXPERTS_ONLY = ("edp", "ep", "etp")
"""In place of `DENSE_ONLY`, the axes along which experts are divided, and their state."""
DATA_AXES = ("replicate", "shard", "cp")
"""The axes whose ranks compute gradients from other tokens."""
STATE_AXES = ("shard", "cp")
"""The axes over which a strategy shards state."""
REPLICA_AXES = ("replicate",)
"""The other axes of `DATA_AXES`, along which sharded state is equal."""
EXPERT_STATE_AXES = ("edp",)
"""The axis over which a strategy shards the state of experts."""
EXPERT_DATA_AXES = ("replicate", "edp")
"""The axes whose ranks hold the same experts, and compute gradients of them from other tokens."""
TOKEN_AXES = ("cp", "tp")
"""The axes whose ranks have the tokens of one micro-batch between them."""
LAYER_AXES = ("tp", "ep", "etp")
"""The axes over which layers are divided, whatever the strategy."""
PLAN_AXES = ("pp", "dp", "cp", "tp")
"""The axes by which a plan is written: `dp` for `replicate` × `shard`."""
STAGE_AXES = ("dp_cp", "tp")
"""The axes that reach, one after the other, all ranks of a stage."""
COMBINED = {
    "dp": ("replicate", "shard"),
    "shard_cp": STATE_AXES,
    "dp_cp": DATA_AXES,
    "model": ("pp", "cp", "tp"),
    "world": AXES,
}
"""Names that combine several axes of a plan."""


def sizes_of(
    *, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, replicate: int = 1, ep: int = 1, etp: int = 1
) -> dict[str, int]:
    """Return the number of ranks along each axis, outermost first; with experts' axes if `ep` · `etp` > 1.

    Raises `MeshError` for invalid degrees.
    """
    degrees = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "replicate": replicate, "ep": ep, "etp": etp}
    require_degrees(degrees)
    if dp % replicate:
        raise MeshError(
            f"the mesh's replicate = {replicate} does not divide dp = {dp}: "
            "choose a divisor, the shard axis is dp / replicate."
        )
    dense = {"pp": pp, "replicate": replicate, "shard": dp // replicate, "cp": cp, "tp": tp}
    if ep * etp == 1:
        return dense
    ranks = prod(dense[axis] for axis in DENSE_ONLY)
    if ranks % (ep * etp):
        raise MeshError(
            f"the mesh's ep · etp = {ep} · {etp} does not divide shard · cp · tp = {ranks}, the ranks "
            "between which experts can be divided: choose divisors."
        )
    return dense | {"edp": ranks // (ep * etp), "ep": ep, "etp": etp}


def sizes_of_plan(plan: Plan) -> dict[str, int]:
    """Return the number of ranks along each axis of a plan's mesh, outermost first."""
    return sizes_of(**{axis: getattr(plan, axis) for axis in (*PLAN_AXES, "replicate", "ep", "etp")})


def grids(axes: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the grids of axes that arrange all ranks: one, and with an `ep` axis a second, for experts."""
    if "ep" not in axes or not set(AXES) <= set(axes):
        return (tuple(axes),)
    return AXES, (*(axis for axis in AXES if axis not in DENSE_ONLY), *EXPERTS_ONLY)


def grid_of(axes: Collection[str], sizes: Collection[str]) -> tuple[str, ...]:
    """Return the first grid of `grids` that has all of `axes`. Raises `MeshError` where none has."""
    for grid in grids(sizes):
        if set(axes) <= set(grid):
            return grid
    raise MeshError(
        f"the axes {', '.join(axes)} do not occur together, as ep and etp divide the ranks of shard, cp "
        "and tp: choose either kind of axes."
    )


def world_size(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh with these sizes."""
    return prod(sizes[axis] for axis in grids(sizes)[0])


def layout_degrees(sizes: Mapping[str, int], *, experts: bool = False) -> dict[str, int]:
    """Return the degree of each axis over which a stage's tensors are laid out: a grid's axes but `pp`.

    `experts`: those of the experts' grid, where `sizes` have it.
    """
    grid = grids(sizes)[-1 if experts else 0]
    return {axis: sizes[axis] for axis in grid if axis != "pp"}


def require_degrees(degrees: Mapping[str, int]) -> None:
    """Raise `MeshError` unless every degree is a whole number of at least 1."""
    for name, degree in degrees.items():
        require_whole(f"the mesh's {name}", degree, MeshError)


def combined_axes(axes: Collection[str] = AXES) -> dict[str, tuple[str, ...]]:
    """Return which axes each combined axis (such as `dp`) stands for, in a mesh with these `axes`."""
    return COMBINED if grids(axes)[0] == AXES else {"world": tuple(axes)}


def axes_of(axis: str | Collection[str], axes: Collection[str] = AXES) -> tuple[str, ...]:
    """Return the axes that `axis` combines, or `axis` itself; several axes in the order of the mesh.

    Raises `MeshError` for an unknown axis.
    """
    if not isinstance(axis, str):
        wanted = {name for one in axis for name in axes_of(one, axes)}
        return tuple(name for name in axes if name in wanted)
    if axis in axes:
        return (axis,)
    combined = combined_axes(axes)
    if axis in combined:
        return combined[axis]
    raise MeshError(f"the mesh has no axis {axis!r}: choose one of {', '.join((*axes, *combined))}.")


def name_of(axis: str | Collection[str], axes: Collection[str] = AXES) -> str:
    """Return the name of several axes together: a combined axis, or their names joined by `_`."""
    if isinstance(axis, str):
        return axis
    along = axes_of(axis, axes)
    return next((name for name, one in combined_axes(axes).items() if one == along), "_".join(along))


def size_along(axis: str | Collection[str], sizes: Mapping[str, int]) -> int:
    """Return the number of ranks along an axis, a combined axis, or several axes together."""
    return prod(sizes[name] for name in axes_of(axis, sizes))


def index_along(axis: str | Collection[str], coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the index of `coordinate` along an axis; along several axes together, row-major."""
    index = 0
    for name in axes_of(axis, sizes):
        index = index * sizes[name] + coordinate[name]
    return index


def coordinate_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of a rank, one index per axis. Raises `MeshError` outside the mesh."""
    world = world_size(sizes)
    if not 0 <= rank < world:
        raise MeshError(f"the mesh has no rank {rank}: its ranks are 0 to {world - 1}.")
    coordinate = {}
    for grid in grids(sizes):
        rest = rank
        for name in reversed(grid):
            rest, coordinate[name] = divmod(rest, sizes[name])
    return {name: coordinate[name] for name in sizes}


def rank_at(coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the rank at a coordinate, which has an index for each axis of at least one of the `grids`.

    Inverse of `coordinate_of`. Raises `MeshError` outside the mesh.
    """
    grid = next(grid for grid in grids(sizes) if set(grid) <= set(coordinate))
    rank = 0
    for name in grid:
        if not 0 <= coordinate[name] < sizes[name]:
            raise MeshError(
                f"the mesh has no {name} = {coordinate[name]}: there are {sizes[name]}, counted from 0."
            )
        rank = rank * sizes[name] + coordinate[name]
    return rank


def split_dp(coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate with its index along `dp`, if any, split into `replicate` and `shard` indices.

    Raises `MeshError` for an unknown axis.
    """
    plain, combined = dict(coordinate), combined_axes(sizes)
    if "dp" in plain and "dp" in combined:
        if "replicate" in plain or "shard" in plain:
            raise MeshError("a coordinate has dp and also replicate or shard: give one or the other.")
        plain["replicate"], plain["shard"] = divmod(plain.pop("dp"), sizes["shard"])
    unknown = set(plain) - set(sizes)
    if unknown:
        known = ", ".join((*sizes, *(["dp"] if "dp" in combined else [])))
        raise MeshError(f"the mesh has no axis {sorted(unknown)[0]!r}: choose among {known}.")
    return plain


def groups_along(axis: str | Collection[str], sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the disjoint groups of ranks that differ along `axis` only, each in order along it."""
    moving = axes_of(axis, sizes)
    apart = [name for name in grid_of(moving, sizes) if name not in moving]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size(sizes)):
        coordinate = coordinate_of(rank, sizes)
        groups.setdefault(tuple(coordinate[name] for name in apart), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
