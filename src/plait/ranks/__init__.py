"""Ranks: mesh, groups, collectives, point-to-point messages, devices, launch, transports, failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.package import public_name

if TYPE_CHECKING:
    from plait.ranks.collectives import all_gather as all_gather
    from plait.ranks.collectives import all_reduce as all_reduce
    from plait.ranks.collectives import all_to_all as all_to_all
    from plait.ranks.collectives import all_to_all_uneven as all_to_all_uneven
    from plait.ranks.collectives import barrier as barrier
    from plait.ranks.collectives import broadcast as broadcast
    from plait.ranks.collectives import gather as gather
    from plait.ranks.collectives import reduce as reduce
    from plait.ranks.collectives import reduce_scatter as reduce_scatter
    from plait.ranks.collectives import scatter as scatter
    from plait.ranks.collectives import shared_zeros as shared_zeros
    from plait.ranks.group import Count as Count
    from plait.ranks.group import Group as Group
    from plait.ranks.group import Traffic as Traffic
    from plait.ranks.handle import Handle as Handle
    from plait.ranks.launch.elastic.options import Elastic as Elastic
    from plait.ranks.mesh import GridMesh as GridMesh
    from plait.ranks.mesh import Mesh as Mesh
    from plait.ranks.point_to_point import receive as receive
    from plait.ranks.point_to_point import send as send

_HOMES = {
    "plait.ranks.collectives": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "all_to_all_uneven",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
        "shared_zeros",
    ),
    "plait.ranks.group": ("Count", "Group", "Traffic"),
    "plait.ranks.handle": ("Handle",),
    "plait.ranks.launch.elastic.options": ("Elastic",),
    "plait.ranks.mesh": ("GridMesh", "Mesh"),
    "plait.ranks.point_to_point": ("receive", "send"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return __all__
