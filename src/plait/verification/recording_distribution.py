"""From rank 0, which has the whole recording, to each rank what it will need of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from plait.comm.collectives import broadcast
from plait.comm.mesh import Mesh
from plait.verification.location import RecordKey, RecordScope
from plait.verification.reference_recording import ReferenceRecording, Tolerance

Thing = TypeVar("Thing")
Wanted = Callable[[RecordScope, RecordKey], bool]
Entry = tuple[RecordKey, tuple[int, ...], torch.dtype, Tolerance]


def share(recording: ReferenceRecording | None, mesh: Mesh, wanted: Wanted) -> ReferenceRecording:
    """What this rank wants of rank 0's recording; only rank 0 gives one, and gets it back whole.

    Communication: broadcasts over the world, moment by moment: its table, then its tensors, packed by dtype.
    """
    world = mesh.group("world")
    if world.size == 1:
        assert recording is not None
        return recording
    scopes = from_first_rank(None if recording is None else list(recording.values), mesh)
    mine = ReferenceRecording()
    for scope in scopes:
        _share_moment(scope, recording, mine, mesh, wanted)
    return recording or mine


def _share_moment(
    scope: RecordScope,
    recording: ReferenceRecording | None,
    mine: ReferenceRecording,
    mesh: Mesh,
    wanted: Wanted,
) -> None:
    world = mesh.group("world")
    table: list[Entry] | None = None
    if recording is not None:
        values, tolerances = recording.values[scope], recording.tolerances[scope]
        table = [(key, tuple(t.shape), t.dtype, tolerances[key]) for key, t in values.items()]
    entries = from_first_rank(table, mesh)
    found: dict[RecordKey, Tensor] = {}
    for dtype in dict.fromkeys(entry[2] for entry in entries):
        packed = [entry for entry in entries if entry[2] == dtype]
        sizes = [torch.Size(shape).numel() for _, shape, _, _ in packed]
        flat = torch.empty(sum(sizes), dtype=dtype, device=mesh.device)
        pieces = torch.split(flat, sizes)
        if recording is not None:
            for (key, *_), piece in zip(packed, pieces, strict=True):
                piece.copy_(recording.values[scope][key].reshape(-1))
        broadcast(flat, world, checked=False).wait()
        for (key, shape, _, _), piece in zip(packed, pieces, strict=True):
            if recording is None and wanted(scope, key):
                found[key] = piece.clone().view(shape)
    mine.values[scope] = found
    mine.tolerances[scope] = {key: tolerance for key, _, _, tolerance in entries if key in found}


def from_first_rank(thing: Thing | None, mesh: Mesh) -> Thing:
    """Rank 0's `thing`, on every rank. Communication: two broadcasts over the world."""
    world = mesh.group("world")
    device = world.device_for_text(mesh.device)
    data = pickle.dumps(thing) if world.index == 0 else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    broadcast(size, world, checked=False).wait()
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if world.index == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    broadcast(buffer, world, checked=False).wait()
    result: Thing = pickle.loads(buffer.cpu().numpy().tobytes())
    return result
