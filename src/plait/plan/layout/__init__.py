"""Layouts: which piece of which global tensor each rank of the mesh holds.

A layout gives every mesh axis one placement: `Replicate` (all ranks hold the same), `Shard(dim)` (each holds
a piece of that dim), `Flat` (each holds an interval of the flattened shard) or `Partial` (each holds a
summand). Sizes need not divide: the first ranks hold one row more, the last may hold empty pieces. Axes that
shard the same dim are nested, the outermost first:

    Layout(shape=(7, 6), axes={"shard": 2, "tp": 3}, placements={"shard": Shard(0), "tp": Shard(0)})

                tp 0        tp 1     tp 2
    shard 0     rows 0, 1   row 2    row 3
    shard 1     row 4       row 5    row 6

`shard` and `assemble` are inverses; `reshape` gives the layout of a reshaped tensor. `moves` gives the
collectives from one layout to another, which `plait.tensor.redistribute` runs. Nothing here communicates.
"""

from typing import Any

from plait.package import submodule
from plait.plan.layout.layout import (
    Box,
    Coordinate,
    Flat,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    divide,
)
from plait.plan.layout.shards import assemble, shard
from plait.plan.layout.transitions import Move, moves, reshape

__all__ = [
    "Box",
    "Coordinate",
    "Flat",
    "Layout",
    "Move",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "assemble",
    "divide",
    "moves",
    "reshape",
    "shard",
]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
