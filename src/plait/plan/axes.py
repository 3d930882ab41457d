"""The axes of a mesh: their names, order and degrees, and the ranks and coordinates along them.

`sizes` maps each axis to its number of ranks, outermost first: row-major, so that consecutive ranks are
neighbours along the last axis. The axes may be those of a plan, or any others; `world` combines all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from plait.errors import MeshError
from plait.plan.arguments import require_whole
from plait.plan.plan import Plan

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""The axes of a plan."""
DATA_AXES = ("replicate", "shard", "cp")
"""The axes whose ranks compute gradients from other tokens."""
STATE_AXES = ("shard", "cp")
"""The axes over which a strategy shards state."""
REPLICA_AXES = ("replicate",)
"""The other axes of `DATA_AXES`, along which sharded state is equal."""
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


def sizes_of(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, replicate: int = 1) -> dict[str, int]:
    """Return the number of ranks along each axis, outermost first. Raises `MeshError` for invalid degrees."""
    require_degrees({"pp": pp, "dp": dp, "cp": cp, "tp": tp, "replicate": replicate})
    if dp % replicate:
        raise MeshError(
            f"the mesh's replicate = {replicate} does not divide dp = {dp}: "
            "choose a divisor, the shard axis is dp / replicate."
        )
    return {"pp": pp, "replicate": replicate, "shard": dp // replicate, "cp": cp, "tp": tp}


def sizes_of_plan(plan: Plan) -> dict[str, int]:
    """Return the number of ranks along each axis of a plan's mesh, outermost first."""
    return {"pp": plan.pp, "replicate": plan.replicate, "shard": plan.shard, "cp": plan.cp, "tp": plan.tp}


def layout_degrees(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes over which a stage's tensors are laid out (all but `pp`) and their numbers of ranks."""
    return {axis: size for axis, size in sizes.items() if axis != "pp"}


def require_degrees(degrees: Mapping[str, int]) -> None:
    """Raise `MeshError` unless every degree is a whole number of at least 1."""
    for name, degree in degrees.items():
        require_whole(f"the mesh's {name}", degree, MeshError)


def combined_axes(axes: Collection[str] = AXES) -> dict[str, tuple[str, ...]]:
    """Return which axes each combined axis (such as `dp`) stands for, in a mesh with these `axes`."""
    return COMBINED if tuple(axes) == AXES else {"world": tuple(axes)}


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
    world = prod(sizes.values())
    if not 0 <= rank < world:
        raise MeshError(f"the mesh has no rank {rank}: its ranks are 0 to {world - 1}.")
    coordinate = {}
    for name in reversed(tuple(sizes)):
        rank, coordinate[name] = divmod(rank, sizes[name])
    return {name: coordinate[name] for name in sizes}


def rank_at(coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the rank at a coordinate: inverse of `coordinate_of`. Raises `MeshError` outside the mesh."""
    for name in sizes:
        if not 0 <= coordinate[name] < sizes[name]:
            raise MeshError(
                f"the mesh has no {name} = {coordinate[name]}: there are {sizes[name]}, counted from 0."
            )
    return index_along("world", coordinate, sizes)


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
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes.values())):
        fixed = (index for name, index in coordinate_of(rank, sizes).items() if name not in moving)
        groups.setdefault(tuple(fixed), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
