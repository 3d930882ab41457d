"""Copies files of a snapshot between hosts, to those whose ranks need them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from plait.checkpoint.loading import raising_on_all_ranks
from plait.checkpoint.manifest import StoredBox
from plait.checkpoint.save_task import file_name
from plait.checkpoint.snapshots.snapshot_buffer import manifest_name
from plait.checkpoint.snapshots.snapshot_folder import SnapshotFolder
from plait.checkpoint.snapshots.snapshot_parts import RankPart
from plait.checkpoint.tensor_file import BETWEEN_SYNCS
from plait.plan.layout.layout import Box
from plait.plan.layout.routes import BoxTransfer
from plait.plan.layout.shards import intersection
from plait.ranks.box_exchange import LocalBoxes, exchange_boxes
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import all_gather_text

_MOST_BYTES = BETWEEN_SYNCS // 4
"""In one transfer."""


def files_to_fetch(
    parts: Sequence[RankPart], needed: Mapping[str, Sequence[Box]], host: int
) -> list[RankPart]:
    """Return the parts on other hosts whose files have boxes that a rank needs and `host` lacks.

    `needed`: the boxes that the rank needs, by tensor.
    """
    fetched = list[RankPart]()
    have = {_identity(box) for part in parts if part.host == host for box in part.boxes}
    for part in parts:
        lacking = [box for box in part.boxes if _identity(box) not in have]
        if any(intersection(box.box, one).numel for box in lacking for one in needed.get(box.tensor, ())):
            fetched.append(part)
            have.update(map(_identity, lacking))
    return fetched


def _identity(box: StoredBox) -> tuple[object, ...]:
    return box.tensor, box.offsets, box.sizes


def fetch_files(
    wanted: Sequence[RankPart],
    parts: Sequence[RankPart],
    mesh: Mesh,
    folder: SnapshotFolder,
    half: int,
    host: int,
) -> list[RankPart]:
    """Copy the files that this host's ranks want from other hosts to its folder; return the files' parts.

    They are copied into one `half` of the folder. `wanted` by this rank, of all `parts` of a snapshot. All
    ranks call it, and each `host` is named by the first of its ranks, which sends and receives. Raises
    CheckpointError on all ranks where there is no room. Communication: names of files over `world`, and their
    bytes in rounds of at most 64 MB a rank.
    """
    own = json.dumps([host, [part.rank for part in wanted]])
    part_of, by_host = {part.rank: part for part in parts}, dict[int, list[int]]()
    for receiver, ranks in map(json.loads, all_gather_text(own, mesh.group("world"), mesh.device)):
        known = by_host.setdefault(receiver, [])
        known += [rank for rank in ranks if rank not in known]
    moves = [(part_of[rank], receiver) for receiver, ranks in by_host.items() for rank in ranks]
    with raising_on_all_ranks(mesh):  # before any rank waits for another
        sources = {
            file_name(part.rank): folder.mapped(part.half, file_name(part.rank), part.bytes)
            for part, _ in moves
            if part.host == mesh.rank
        }
        targets = {
            file_name(part.rank): _new_file(folder, half, part)
            for part, receiver in moves
            if receiver == mesh.rank
        }
    transfers = [one for part, receiver in moves for one in _transfers(part, receiver)]
    world, device = mesh.group("world"), mesh.device
    exchange_boxes(transfers, _whole(sources), _whole(targets), world, torch.uint8, device, most=_MOST_BYTES)
    return [part_of[rank] for rank in by_host[host]]


def _new_file(folder: SnapshotFolder, half: int, part: RankPart) -> Tensor:
    """Return the memory of a file for a part of another host, which is not complete from now on."""
    folder.withdraw(half, manifest_name(part.rank))
    return folder.mapped(half, file_name(part.rank), part.bytes)


def _whole(files: Mapping[str, Tensor]) -> dict[str, LocalBoxes]:
    return {name: LocalBoxes.whole(memory) for name, memory in files.items()}


def _transfers(part: RankPart, receiver: int) -> Iterator[BoxTransfer]:
    """Yield the transfers of the bytes of a part's file."""
    for start in range(0, part.bytes, _MOST_BYTES):
        box = Box((start,), (min(_MOST_BYTES, part.bytes - start),))
        yield BoxTransfer(file_name(part.rank), box, part.host, receiver)


def files_for_next_host(parts: Sequence[RankPart], host: int) -> list[RankPart]:
    """Return the parts that `host` backs up: of the host before it in a ring, with boxes no other has."""
    hosts = sorted({part.host for part in parts})
    before = hosts[hosts.index(host) - 1]
    elsewhere = {_identity(box) for part in parts if part.host != before for box in part.boxes}
    return [
        part for part in parts if part.host == before and not elsewhere.issuperset(map(_identity, part.boxes))
    ]
