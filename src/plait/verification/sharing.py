"""From rank 0, which has the whole recording, to each rank what it will need of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from plait.comm.collectives import broadcast
from plait.comm.mesh import Mesh
from plait.verification.place import Key, Moment
from plait.verification.recording import Bound, Recording

Thing = TypeVar("Thing")
Wanted = Callable[[Moment, Key], bool]
Entry = tuple[Key, tuple[int, ...], torch.dtype, Bound]


def share(recording: Recording | None, mesh: Mesh, wanted: Wanted) -> Recording:
    """What this rank wants of rank 0's recording; only rank 0 gives one, and gets it back whole.

    Communication: broadcasts over the world, moment by moment: its table, then its tensors, packed by dtype.
    """
    world = mesh.group("world")
    if world.size == 1:
        assert recording is not None
        return recording
    moments = from_first_rank(None if recording is None else list(recording.values), mesh)
    mine = Recording()
    for moment in moments:
        _share_moment(moment, recording, mine, mesh, wanted)
    return recording or mine


def _share_moment(
    moment: Moment, recording: Recording | None, mine: Recording, mesh: Mesh, wanted: Wanted
) -> None:
    world = mesh.group("world")
    table: list[Entry] | None = None
    if recording is not None:
        values, bounds = recording.values[moment], recording.bounds[moment]
        table = [(key, tuple(t.shape), t.dtype, bounds[key]) for key, t in values.items()]
    entries = from_first_rank(table, mesh)
    found: dict[Key, Tensor] = {}
    for dtype in dict.fromkeys(entry[2] for entry in entries):
        packed = [entry for entry in entries if entry[2] == dtype]
        sizes = [torch.Size(shape).numel() for _, shape, _, _ in packed]
        flat = torch.empty(sum(sizes), dtype=dtype, device=mesh.device)
        pieces = torch.split(flat, sizes)
        if recording is not None:
            for (key, *_), piece in zip(packed, pieces, strict=True):
                piece.copy_(recording.values[moment][key].reshape(-1))
        broadcast(flat, world, checked=False).wait()
        for (key, shape, _, _), piece in zip(packed, pieces, strict=True):
            if recording is None and wanted(moment, key):
                found[key] = piece.clone().view(shape)
    mine.values[moment] = found
    mine.bounds[moment] = {key: bound for key, _, _, bound in entries if key in found}


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
