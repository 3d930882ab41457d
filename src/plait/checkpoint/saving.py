"""`save`: what a run needs to go on, in boxes of global tensors, so that any layout can load it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import restore_name, unfinished_path
from plait.checkpoint.manifest import FILE, Manifest, ManifestPart, TensorEntry
from plait.checkpoint.optimizer_state import described
from plait.checkpoint.rank_contents import Checkpointable, RankPiece, rank_contents, written_by
from plait.checkpoint.save_task import PendingSave, SaveTask, sees
from plait.checkpoint.staging import Staging, chunk_boxes, unstaged
from plait.checkpoint.tensor_file import BoxToWrite
from plait.comm.mesh import Mesh
from plait.comm.text import all_gather_text
from plait.errors import CheckpointError

_MAY_TAKE = 30.0
"""Seconds until a folder is seen that another host has made."""


def save(
    engine: Checkpointable,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    state: Mapping[str, Any] | None = None,
    *,
    wait: bool = True,
) -> PendingSave:
    """Write a checkpoint to the folder `path`: parameters, optimizer, and what else the next step depends on.

    Between steps, on all ranks; all hosts see that folder. `state` is yours, as JSON holds it: the number of
    steps, a scheduler's `state_dict()`; that of rank 0 counts, and `load` gives it back. Gradients are not
    saved. Complete, or not there: a checkpoint that is already at `path` stays until the new one takes its
    place. With `wait=False` this returns as soon as there are copies in the CPU's memory, as large as what
    this rank writes; call `.wait()` of what it gives before the next, and before the ranks end. Raises
    `CheckpointError`, on all ranks, where one cannot write; older checkpoints are then as they were.
    Communication: two all-reduces of 8 bytes over `world`, and one in `.wait()`.
    """
    writing = start(engine, optimizer, Path(path), state or {}, None if wait else Staging())
    if wait:
        writing.wait()
    return writing


def start(
    engine: Checkpointable,
    optimizer: torch.optim.Optimizer | None,
    path: Path,
    state: Mapping[str, Any],
    staging: Staging | None,
    *,
    disk: Disk | None = None,
    first: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> PendingSave:
    """Begin to write; with `staging` in the background. See `save`.

    Rank 0 calls `first` before anything is written, `before` when the checkpoint is complete and about to get
    its name, and `after` when it has it; all may raise OSError.
    """
    mesh, disk, folder = engine.mesh, disk or Disk(), unfinished_path(path)
    flaw, items, made = "", list[BoxToWrite](), False
    try:
        held = list(rank_contents(engine, optimizer))
        share = _share(engine, optimizer, held)
        boxes = chunk_boxes(written_by(held, mesh.rank), mesh.coordinate)
        head = _head(engine, state)
        if mesh.rank == 0:
            first()
            _prepare(path, disk)
            made = True
        items = unstaged(boxes) if staging is None else staging.copied(boxes)
    except Exception as error:  # whatever it is, the others wait to hear of it
        flaw = f"rank {mesh.rank}: {error if isinstance(error, OSError | CheckpointError) else repr(error)}"
    flaw = _first(flaw, mesh)
    if not flaw:
        there = sees(folder, min(mesh.timeout / 2, _MAY_TAKE))
        alone = f"rank {mesh.rank} does not see {folder}: give a folder that all hosts share"
        flaw = _first("" if there else alone, mesh)
    if flaw:
        if made:
            with suppress(OSError):  # what went wrong first is told
                disk.remove(folder)
        raise CheckpointError(f"the checkpoint {path} was not written ({flaw}): nothing was changed.")
    work = SaveTask(
        path=path,
        rank=mesh.rank,
        ranks=mesh.world,
        items=items,
        share=share,
        head=head,
        disk=disk,
        patience=mesh.timeout / 2,  # all are back while those that came first still wait
        before=before,
        after=after,
    )
    return PendingSave(work, mesh, background=staging is not None)


def _first(flaw: str, mesh: Mesh) -> str:
    """On all ranks what the first has to say that met a flaw; empty: none did."""
    return next(filter(None, all_gather_text(flaw, mesh.group("world"), mesh.device)), "")


def _prepare(path: Path, disk: Disk) -> None:
    """Make the folder to write in. CheckpointError where `path` is something else than a checkpoint."""
    if path.exists() and not (path / FILE).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there and is no checkpoint: choose a path that is free")
    restore_name(path, disk)
    if unfinished_path(path).exists():
        disk.remove(unfinished_path(path))
    disk.make_folder(unfinished_path(path))


def _share(
    engine: Checkpointable, optimizer: torch.optim.Optimizer | None, held: list[RankPiece]
) -> ManifestPart:
    tensors = {
        one.name: TensorEntry(one.layout.shape, str(one.piece.dtype).partition(".")[2]) for one in held
    }
    if optimizer is None:
        return ManifestPart(tensors)
    names = {id(piece): name for name, piece in engine.named_parameters()}
    return ManifestPart(tensors, described(optimizer, names))


def _head(engine: Checkpointable, state: Mapping[str, Any]) -> Manifest:
    _require_text_keys(state)
    try:
        state = json.loads(json.dumps(state))  # as it is now: it may change before it is written
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state to be saved is not what JSON can hold ({error})") from None
    return Manifest(
        tensors={},
        files=(),
        run=engine.run_state,
        state=state,
        aliases=engine.aliases,
        plan=asdict(engine.plan),
        versions={"plait": version("plait"), "torch": torch.__version__, "python": platform.python_version()},
    )


def _require_text_keys(state: object) -> None:
    """CheckpointError for keys that JSON would give back as text, as those of a MultiStepLR's milestones."""
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"the state to be saved has a key {key!r}, which JSON would turn into text: make it text"
                )
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    for value in inner:
        _require_text_keys(value)
