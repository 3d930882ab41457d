"""Communication between ranks: mesh, groups, collectives, point-to-point messages, traffic, launch."""

from typing import Any

from plait.comm.collectives import (
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
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.mesh import GridMesh, Mesh
from plait.comm.point_to_point import receive, send
from plait.comm.traffic import Count, Traffic
from plait.submodules import submodule

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
