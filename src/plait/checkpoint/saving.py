"""`save`: plan on all ranks which tensors each of them writes, and start to write them (see `save_task`).

Boxes are written directly, or from copies on the CPU so that training can continue.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import restore_name, unfinished_path
from plait.checkpoint.manifest import FILE, Manifest, TensorEntry
from plait.checkpoint.optimizer_set import GivenOptimizers, OptimizerSet
from plait.checkpoint.optimizer_state import describe
from plait.checkpoint.rank_contents import (
    Checkpointable,
    RankShard,
    rank_contents,
    require_engine,
    written_by,
)
from plait.checkpoint.save_task import ManifestPart, PendingSave, SaveTask, wait_for_folder
from plait.checkpoint.tensor_file import DTYPES, BoxToWrite
from plait.errors import CheckpointError
from plait.package import VERSION
from plait.plan.argument_checks import require_flag, require_instance
from plait.plan.layout.shards import shard_boxes
from plait.ranks.accelerator import StreamEvent, copy_later, host_bytes, is_accelerator
from plait.ranks.text_collectives import first_nonempty_text

LocalBox = tuple[BoxToWrite, Tensor]
"""A box of a global tensor, to be written without staging, and its view in this rank's memory."""
_FOLDER_TIMEOUT = 30.0
"""Most seconds until a folder that another host has made is visible."""


def save(
    engine: Checkpointable,
    optimizer: GivenOptimizers,
    path: str | Path,
    state: Mapping[str, Any] | None = None,
    *,
    wait: bool = True,
) -> PendingSave:
    """Write a checkpoint to the folder `path`: parameters, optimizer and other state of the run.

    Called between steps, on all ranks; all hosts must share the folder. `state`: your own state as JSON holds
    it, such as the step or a scheduler's `state_dict()`; that of rank 0 is saved, and `load` returns it.
    `optimizer`: one, a list of several with different parameters, or None.
    Gradients are not saved. The checkpoint appears at `path` when it is complete; an older one at `path`
    stays until then. With `wait=False` this returns when copies are in CPU memory, as large as what this rank
    writes; call `.wait()` of the result before the next save and before the ranks end. Raises
    `CheckpointError` on all ranks where one cannot write; older checkpoints are then unchanged.
    Communication: two all-reduces of 8 bytes over `world`, and one in `.wait()`.
    """
    require_engine(engine)
    require_flag("wait", wait, CheckpointError)
    require_instance("the path of a checkpoint", path, (str, Path), "give a path", CheckpointError)
    if state is not None:
        require_instance("the state to be saved", state, Mapping, "give a dictionary", CheckpointError)
    pending = start_save(engine, optimizer, Path(path), state or {}, None if wait else StagingBuffer())
    if wait:
        pending.wait()
    return pending


def start_save(
    engine: Checkpointable,
    optimizer: GivenOptimizers,
    path: Path,
    state: Mapping[str, Any],
    staging: StagingBuffer | None,
    *,
    disk: Disk | None = None,
    on_start: Callable[[], None] = lambda: None,
    before_commit: Callable[[], None] = lambda: None,
    after_commit: Callable[[], None] = lambda: None,
) -> PendingSave:
    """Write a checkpoint as `save` does; with a `staging` buffer, copy to it, then write in the background.

    Rank 0 calls `on_start` before anything is written, `before_commit` when the checkpoint is complete but
    does not have its name yet, and `after_commit` when it has; all may raise OSError.
    """
    mesh, disk, folder = engine.mesh, disk or Disk(), unfinished_path(path)
    world = mesh.group("world")
    error, items, made = "", list[BoxToWrite](), False
    try:
        part, boxes = contents_to_write(engine, OptimizerSet.of(optimizer), range(mesh.world))
        head = manifest_head(engine, state)
        if mesh.rank == 0:
            on_start()
            _make_folder(path, disk)
            made = True
        items = [item for item, _ in boxes] if staging is None else staging.stage(boxes)
    except Exception as raised:  # any error: the other ranks wait for the all-gather below
        error = (
            f"rank {mesh.rank}: {raised if isinstance(raised, OSError | CheckpointError) else repr(raised)}"
        )
    error = first_nonempty_text(error, world, mesh.device)
    if not error:
        seen = wait_for_folder(folder, min(mesh.timeout / 2, _FOLDER_TIMEOUT))
        unseen = f"rank {mesh.rank} does not see {folder}: give a folder that all hosts share"
        error = first_nonempty_text("" if seen else unseen, world, mesh.device)
    if error:
        if made:
            with suppress(OSError):  # the first error is raised
                disk.remove(folder)
        raise CheckpointError(f"the checkpoint {path} was not written ({error}): nothing was changed.")
    task = SaveTask(
        path=path,
        mesh=mesh,
        items=items,
        part=part,
        head=head,
        disk=disk,
        before_commit=before_commit,
        after_commit=after_commit,
    )
    return PendingSave(task, background=staging is not None)


def _make_folder(path: Path, disk: Disk) -> None:
    """Make the hidden folder to write in. Raises CheckpointError where `path` exists and is no checkpoint."""
    if path.exists() and not (path / FILE).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there and is no checkpoint: choose a path that is free")
    restore_name(path, disk)
    if unfinished_path(path).exists():
        disk.remove(unfinished_path(path))
    disk.make_folder(unfinished_path(path))


def contents_to_write(
    engine: Checkpointable, optimizers: OptimizerSet | None, writers: Collection[int]
) -> tuple[ManifestPart, list[LocalBox]]:
    """Return this rank's part of the manifest, not yet with its file, and the boxes that it writes.

    `writers`: the ranks that write all that they hold together, each box once.
    """
    shards = [
        replace(one, ranks=tuple(rank for rank in one.ranks if rank in writers))
        for one in rank_contents(engine, optimizers)
    ]
    tensors = {one.name: TensorEntry.of(one.layout.shape, one.shard.dtype) for one in shards}
    names = {id(shard): name for name, shard in engine.named_parameters()}
    part = ManifestPart(tensors, None if optimizers is None else describe(optimizers, names))
    return part, local_boxes(written_by(shards, engine.mesh.rank), engine.mesh.coordinate)


def manifest_head(engine: Checkpointable, state: Mapping[str, Any]) -> Manifest:
    """Return a manifest of the run's state, plan and versions; tensors and files are added when written.

    Raises CheckpointError for a `state` that JSON does not hold as it is.
    """
    _require_text_keys(state)
    try:
        state = json.loads(json.dumps(state))  # a copy: the caller may change it before it is written
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state to be saved is not what JSON can hold ({error})") from None
    return Manifest(
        tensors={},
        files=(),
        run=engine.run_state,
        state=state,
        aliases=engine.shard_plan.aliases,
        plan=asdict(engine.shard_plan.plan),
        versions={"plait": VERSION, "torch": torch.__version__, "python": platform.python_version()},
    )


def _require_text_keys(state: object) -> None:
    """Raise CheckpointError for non-text keys (as in MultiStepLR's milestones): JSON returns them as text."""
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"the state to be saved has a key {key!r}, which JSON would turn into text: make it text"
                )
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    for value in inner:
        _require_text_keys(value)


def local_boxes(shards: Iterable[RankShard], coordinate: Mapping[str, int]) -> list[LocalBox]:
    """Return the boxes (ranges of global tensors) that make up `shards`, each with a view of its memory.

    Raises CheckpointError for a dtype that files cannot store.
    """
    found = []
    for shard in shards:
        if shard.shard.dtype not in DTYPES:
            raise CheckpointError(f"{shard.name} is {shard.shard.dtype}, which no safetensors file can hold.")
        for part in shard_boxes(shard.layout, coordinate):
            view = part.view_of(shard.shard)
            found.append((BoxToWrite(shard.name, part.box, view.dtype, view.cpu), view))
    return found


class StagingBuffer:
    """CPU memory for copies of a checkpoint's boxes, reused by the next checkpoint to save time.

    For CUDA tensors it is pinned, and the copies are asynchronous on the current stream.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._memory.nbytes

    def stage(self, boxes: Sequence[LocalBox]) -> list[BoxToWrite]:
        """Start to copy the boxes; return items that read the copies, which are valid until the next call."""
        devices = {view.device for _, view in boxes if is_accelerator(view)}
        self._allocate(sum(_aligned_bytes(view) for _, view in boxes), pinned=bool(devices))
        copies, start = [], 0
        for _, view in boxes:
            copies.append(self._memory[start : start + view.nbytes].view(view.dtype).view(view.shape))
            copy_later(copies[-1], view)
            start += _aligned_bytes(view)
        copied = [StreamEvent(device) for device in devices]
        return [
            replace(item, read=partial(_after, copied, copy))
            for (item, _), copy in zip(boxes, copies, strict=True)
        ]

    def _allocate(self, size: int, *, pinned: bool) -> None:
        if self._memory.nbytes < size or self._memory.is_pinned() != pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            self._memory = host_bytes(size, pinned=pinned)


def _aligned_bytes(view: Tensor) -> int:
    """Return the size of `view` in bytes, rounded up to 16, the alignment of the largest dtype."""
    return -(-view.nbytes // 16) * 16


def _after(events: Sequence[StreamEvent], copy: Tensor) -> Tensor:
    """Block until the device has reached `events`, recorded after the copying; return `copy`."""
    for event in events:
        event.wait()
    return copy
