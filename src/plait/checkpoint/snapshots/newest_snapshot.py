"""Finds the snapshots that are complete on all ranks that wrote them; merges the manifests of one's ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from plait.checkpoint.manifest import Manifest, read_manifest, section
from plait.checkpoint.save_task import ManifestPart, merge_parts
from plait.checkpoint.snapshots.snapshot_buffer import manifest_name
from plait.checkpoint.snapshots.snapshot_folder import HALVES, SnapshotFolder
from plait.errors import CheckpointError
from plait.files import adapter_of


@dataclass(frozen=True)
class SnapshotName:
    """What the ranks' parts of one snapshot have in common."""

    step: int
    attempt: str
    """Another for each start of the ranks: two of them may write the same step."""
    ranks: int
    """The number of ranks that wrote it."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a snapshot, found complete in this host's folder."""

    half: int
    rank: int
    name: SnapshotName
    restarted_by: str
    """The identity of the process on this host that restarted the rank's run."""
    manifest: Manifest


def found_parts(folder: SnapshotFolder) -> list[RankPart]:
    """Return all parts of snapshots in `folder` that have an intact manifest."""
    paths = (path for half in HALVES for path in sorted(folder.half(half).glob("*.json")))
    return [part for path in paths if (part := _read(path)) is not None]


def _read(path: Path) -> RankPart | None:
    """Return the part that a manifest describes; None where it is damaged, or was never finished."""
    try:
        manifest = read_manifest(path.parent, path.name)
        about = section(manifest.state, "snapshot")
        name = SnapshotName(about["step"], about["attempt"], about["ranks"])
        rank = int(about["rank"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
    is_own = path.name == manifest_name(rank)
    return RankPart(int(path.parent.name), rank, name, about["restarted_by"], manifest) if is_own else None


def complete_names(parts: Iterable[tuple[int, SnapshotName]]) -> list[SnapshotName]:
    """Return the snapshots of which all ranks' parts are there, newest first, given each part's rank."""
    ranks: dict[SnapshotName, set[int]] = {}
    for rank, name in parts:
        ranks.setdefault(name, set()).add(rank)
    whole = [name for name, found in ranks.items() if found == set(range(name.ranks))]
    return sorted(whole, key=lambda name: name.step, reverse=True)


@dataclass(frozen=True)
class PartElsewhere:
    """One rank's part of a snapshot on another host: what it holds, without its file."""

    rank: int
    name: SnapshotName
    part: ManifestPart


def text_of_parts(parts: Sequence[RankPart]) -> str:
    """Return `parts` as text for other hosts, which `parts_of_text` reads."""
    found = [PartElsewhere(one.rank, one.name, _without_file(one)) for one in parts]
    return json.dumps(found, default=vars)


def parts_of_text(text: str) -> list[PartElsewhere]:
    """Return the parts in a text of `text_of_parts`; none of an empty text."""
    return adapter_of(list[PartElsewhere]).validate_json(text) if text else []


def merged_manifest(own: Sequence[RankPart], elsewhere: Iterable[PartElsewhere]) -> Manifest:
    """Return the manifest of a snapshot: all tensors, and the files of this host, `own`."""
    parts = {one.rank: one.part for one in elsewhere}
    parts |= {one.rank: replace(_without_file(one), file=one.manifest.files[0]) for one in own}
    first = own[0].manifest
    aliases = dict(chain.from_iterable(one.manifest.aliases.items() for one in own))
    state: Mapping[str, object] = section(first.state, "state")
    head = replace(first, state=dict(state), aliases=aliases)
    return merge_parts(head, [parts[rank] for rank in sorted(parts)])


def _without_file(part: RankPart) -> ManifestPart:
    return ManifestPart(part.manifest.tensors, part.manifest.optimizer)
