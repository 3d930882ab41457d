"""Layouts: which shard of which global tensor each rank of the mesh holds.

A layout gives every mesh axis one placement: `Replicate` (all ranks hold the same), `Shard(dim)` (each holds
a shard of that dim), `Flat` (each holds an interval of the flattened shard) or `Partial` (each holds a
summand). Sizes need not divide: the first ranks hold one row more, the last may hold empty shards. Axes that
shard the same dim are nested, the outermost first:

    Layout(shape=(7, 6), axes={"shard": 2, "tp": 3}, placements={"shard": Shard(0), "tp": Shard(0)})

                tp 0        tp 1     tp 2
    shard 0     rows 0, 1   row 2    row 3
    shard 1     row 4       row 5    row 6

`shard` and `assemble` are inverses; `reshape` gives the layout of a reshaped tensor. `moves` gives the
collectives from one layout to another, which `plait.tensor.redistribute` runs. Nothing here communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.package import public_name

if TYPE_CHECKING:
    from plait.plan.layout.layout import Box as Box
    from plait.plan.layout.layout import Coordinate as Coordinate
    from plait.plan.layout.layout import Flat as Flat
    from plait.plan.layout.layout import Layout as Layout
    from plait.plan.layout.layout import Partial as Partial
    from plait.plan.layout.layout import Placement as Placement
    from plait.plan.layout.layout import Replicate as Replicate
    from plait.plan.layout.layout import Shard as Shard
    from plait.plan.layout.layout import divide as divide
    from plait.plan.layout.shards import assemble as assemble
    from plait.plan.layout.shards import shard as shard
    from plait.plan.layout.transitions import Move as Move
    from plait.plan.layout.transitions import moves as moves
    from plait.plan.layout.transitions import reshape as reshape

_HOMES = {
    "plait.plan.layout.layout": (
        "Box",
        "Coordinate",
        "Flat",
        "Layout",
        "Partial",
        "Placement",
        "Replicate",
        "Shard",
        "divide",
    ),
    "plait.plan.layout.shards": ("assemble", "shard"),
    "plait.plan.layout.transitions": ("Move", "moves", "reshape"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return __all__
