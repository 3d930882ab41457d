"""Distribution of rank 0's recording: each rank receives the part needed for its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from plait.ranks import plain_values
from plait.ranks.collectives import broadcast
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import broadcast_text
from plait.verification.location import RecordKey, RecordScope
from plait.verification.reference.recording import ReferenceRecording, Tolerance

Object = TypeVar("Object")
Wanted = Callable[[RecordScope, RecordKey], bool]
TableEntry = tuple[RecordKey, tuple[int, ...], torch.dtype, Tolerance]


def distribute_recording(
    recording: ReferenceRecording | None, mesh: Mesh, wanted: Wanted
) -> ReferenceRecording:
    """Return the part of rank 0's `recording` for which `wanted` is true; on rank 0 all of it.

    Communication: broadcasts over the world, for each scope: its table, then its tensors, packed by dtype.
    """
    if mesh.group("world").size == 1:
        assert recording is not None
        return recording
    head = None if recording is None else (list(recording.values), recording.narrowing)
    scopes, narrowing = broadcast_object(head, mesh)
    received = ReferenceRecording(narrowing=narrowing)
    for scope in scopes:
        _broadcast_scope(scope, recording, received, mesh, wanted)
    return recording or received


def _broadcast_scope(
    scope: RecordScope,
    recording: ReferenceRecording | None,
    received: ReferenceRecording,
    mesh: Mesh,
    wanted: Wanted,
) -> None:
    table: list[TableEntry] | None = None
    if recording is not None:
        values, tolerances = recording.values[scope], recording.tolerances[scope]
        table = [(key, tuple(t.shape), t.dtype, tolerances[key]) for key, t in values.items()]
    entries = broadcast_object(table, mesh)
    kept: dict[RecordKey, Tensor] = {}
    for dtype in dict.fromkeys(entry[2] for entry in entries):
        packed = [entry for entry in entries if entry[2] == dtype]
        sizes = [torch.Size(shape).numel() for _, shape, _, _ in packed]
        flat = torch.empty(sum(sizes), dtype=dtype, device=mesh.device)
        pieces = torch.split(flat, sizes)
        if recording is not None:
            for (key, *_), piece in zip(packed, pieces, strict=True):
                piece.copy_(recording.values[scope][key].reshape(-1))
        broadcast(flat, mesh.group("world"), checked=False).wait()
        for (key, shape, _, _), piece in zip(packed, pieces, strict=True):
            if recording is None and wanted(scope, key):
                kept[key] = piece.clone().view(shape)
    received.values[scope] = kept
    received.tolerances[scope] = {key: tolerance for key, _, _, tolerance in entries if key in kept}


def broadcast_object(thing: Object | None, mesh: Mesh) -> Object:
    """Return rank 0's object, one that `plain_values` knows, on all ranks.

    Communication: two broadcasts over the world.
    """
    world = mesh.group("world")
    text = plain_values.encode(thing) if world.index == 0 else ""
    received: Object = plain_values.decode(broadcast_text(text, world, world.device_for_text(mesh.device)))
    return received
