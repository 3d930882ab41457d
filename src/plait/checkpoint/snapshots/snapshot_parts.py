"""Finds the snapshots that are complete on all ranks that wrote them; merges the ranks' manifests of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

from plait.checkpoint.manifest import Manifest, StoredBox, read_manifest, section
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.save_task import ManifestPart, merge_parts
from plait.checkpoint.snapshots.snapshot_buffer import manifest_name
from plait.checkpoint.snapshots.snapshot_folder import HALVES, SnapshotFolder
from plait.errors import CheckpointError
from plait.files import adapter_of
from plait.plan.shard_plan import ShardPlan


@dataclass(frozen=True)
class SnapshotName:
    """Identifies a snapshot by its step and by the start of the ranks (attempt) that took it.

    All ranks' parts of one snapshot have equal names.
    """

    step: int
    attempt: str
    """Another for each start of the ranks: two of them may write the same step."""
    ranks: int
    """The number of ranks that wrote it."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a snapshot, found complete in the folder of a host."""

    host: int
    """The first of the ranks that look for snapshots on that host now."""
    half: int
    rank: int
    """That which wrote it."""
    name: SnapshotName
    restarted_by: str
    """The identity of the process on this host that restarted the rank's run."""
    state_ranks: tuple[int, ...]
    """The ranks that alone had the optimizer state of parameters of this rank."""
    manifest: Manifest

    @property
    def boxes(self) -> tuple[StoredBox, ...]:
        """The boxes that the part's file holds."""
        return self.manifest.files[0].boxes

    @property
    def bytes(self) -> int:
        """The size of the part's file."""
        return self.manifest.files[0].bytes


def found_parts(folder: SnapshotFolder, host: int) -> list[RankPart]:
    """Return all parts of snapshots with an intact manifest in `folder`, which is on `host`."""
    paths = (path for half in HALVES for path in sorted(folder.half(half).glob("*.json")))
    return [part for path in paths if (part := _read(path, host)) is not None]


def _read(path: Path, host: int) -> RankPart | None:
    """Return the part that a manifest describes; None where it is damaged, or was never finished."""
    try:
        manifest = read_manifest(path.parent, path.name)
        about = section(manifest.state, "snapshot")
        name = SnapshotName(about["step"], about["attempt"], about["ranks"])
        by, state_ranks = about["restarted_by"], tuple(about["state_ranks"])
        part = RankPart(host, int(path.parent.name), about["rank"], name, by, state_ranks, manifest)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
    return part if path.name == manifest_name(part.rank) else None


def is_right(name: SnapshotName, wrong: Mapping[str, int], most: int | None = None) -> bool:
    """Return whether a snapshot has no known wrong bits.

    `wrong`: after how many steps states have some, by the attempt. `most`: the last right step of all.
    """
    limits = [limit for limit in (wrong.get(name.attempt), most) if limit is not None]
    return name.step <= min(limits, default=name.step)


def newest_first(parts: Iterable[tuple[int, SnapshotName]]) -> list[tuple[SnapshotName, bool]]:
    """Return the snapshots found, newest first, each with whether the parts of all ranks are there."""
    ranks: dict[SnapshotName, set[int]] = {}
    for rank, name in parts:
        ranks.setdefault(name, set()).add(rank)
    ordered = sorted(ranks, key=lambda name: name.step, reverse=True)
    return [(name, ranks[name] == set(range(name.ranks))) for name in ordered]


def has_all_states(parts: Sequence[RankPart]) -> bool:
    """Return whether there is a part of each rank that alone had the optimizer state of a parameter."""
    return {rank for part in parts for rank in part.state_ranks} <= {part.rank for part in parts}


def has_whole_tensors(manifest: Manifest, shard_plan: ShardPlan) -> bool:
    """Return whether all elements of all tensors are stored, and all parameters are among these tensors."""
    stored = manifest.boxes_by_tensor()
    is_whole = (
        sum(box.box.numel for _, box in stored[key]) == prod(entry.shape)
        for key, entry in manifest.tensors.items()
    )
    return {parameter_key(name) for name in shard_plan.shapes} <= set(stored) and all(is_whole)


def text_of_parts(parts: Sequence[RankPart]) -> str:
    """Return `parts` as text for other hosts, which `parts_of_text` reads."""
    return json.dumps(parts, default=vars)


def parts_of_text(text: str) -> list[RankPart]:
    """Return the parts of ranks that a text of `text_of_parts` describes; [] for an empty text."""
    return adapter_of(list[RankPart]).validate_json(text) if text else []


def merged_manifest(parts: Sequence[RankPart], here: Sequence[RankPart]) -> Manifest:
    """Return the manifest of a snapshot, given all ranks' `parts`, with the files of those `here`."""
    files = {one.rank: one.manifest.files[0] for one in here}
    ordered = sorted(parts, key=lambda one: one.rank)
    merged = [
        ManifestPart(one.manifest.tensors, one.manifest.optimizer, files.get(one.rank)) for one in ordered
    ]
    aliases = dict(chain.from_iterable(one.manifest.aliases.items() for one in ordered))
    first = ordered[0].manifest
    state: Mapping[str, object] = section(first.state, "state")
    return merge_parts(replace(first, files=(), state=dict(state), aliases=aliases), merged)
