"""Communication between ranks: mesh, groups, collectives, point-to-point messages, traffic, launch."""

from typing import Any

from plait.package import submodule
from plait.ranks.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_uneven,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    shared_zeros,
)
from plait.ranks.group import Count, Group, Traffic
from plait.ranks.handle import Handle
from plait.ranks.mesh import GridMesh, Mesh
from plait.ranks.point_to_point import receive, send

__all__ = [
    "Count",
    "GridMesh",
    "Group",
    "Handle",
    "Mesh",
    "Traffic",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_uneven",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "shared_zeros",
]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
