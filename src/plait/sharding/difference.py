"""What is told where replicas differ: which tensor of a parameter, and which ranks hold what."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from plait.comm.coordinates import index_along
from plait.comm.mesh import Mesh
from plait.comm.text import all_gather_text
from plait.layout import Layout

_MOST_RANKS = 8
"""That are listed for each version of a tensor."""

Versions = Mapping[str, str]
"""What a rank holds of a parameter: what each tensor is, and its bits."""


def describe_difference(name: str, layout: Layout, mine: Versions, mesh: Mesh) -> str:
    """Say, alike on every rank, in what the ranks' versions of a parameter differ: the first tensor, by rank.

    `mine` is empty where this rank does not hold it. Every rank of the world calls it.
    Communication: 8 bytes, and a line of text, gathered over `world`.
    """
    for what, owners in _differences(_everyones(mine, mesh), layout, mesh):
        told = " but ".join(f"{version} on {_listed(ranks, mesh)}" for version, ranks in owners.items())
        return f"the {what} of {name} is {told}"
    return f"{name} changed while it was compared"


def _differences(
    told: Sequence[Versions], layout: Layout, mesh: Mesh
) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Each tensor that ranks with the same piece hold in several versions, and who holds which."""
    pieces: dict[tuple[int, ...], list[int]] = {}
    for rank, versions in enumerate(told):
        if versions:
            pieces.setdefault(layout.owner(mesh.coordinate_of(rank)), []).append(rank)
    for ranks in pieces.values():
        for what in dict.fromkeys(what for rank in ranks for what in told[rank]):
            owners: dict[str, list[int]] = {}
            for rank in ranks:
                owners.setdefault(told[rank].get(what, "missing"), []).append(rank)
            if len(owners) > 1:
                yield what, owners


def _everyones(mine: Versions, mesh: Mesh) -> list[Versions]:
    """Those of every rank of the world."""
    return [json.loads(text) for text in all_gather_text(json.dumps(mine), mesh.group("world"), mesh.device)]


def _listed(ranks: Sequence[int], mesh: Mesh) -> str:
    """`ranks 0 (dp 0, tp 0), 2 (dp 1, tp 0) and 9 more`."""
    axes = [axis for axis in ("pp", "dp", "tp") if mesh.size(axis) > 1]
    listed = []
    for rank in ranks[:_MOST_RANKS]:
        coordinate = mesh.coordinate_of(rank)
        place = ", ".join(f"{axis} {index_along(axis, coordinate, mesh.sizes)}" for axis in axes)
        listed.append(f"{rank} ({place})")
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}{more}"
