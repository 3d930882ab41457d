"""`load`: a checkpoint of any layout into an engine of any layout.

Before anything is changed the ranks have looked through every byte of the files, each some of them, and know
that all tensors of the model are there. Then each rank reads what it holds, one box after another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.box_reader import BoxReader
from plait.checkpoint.compatibility import applicable_run_state, require_compatible
from plait.checkpoint.folders import previous_checkpoint, resolve
from plait.checkpoint.manifest import FILE, TAKE_ANOTHER, Manifest, TensorEntry, read_manifest
from plait.checkpoint.optimizer_groups import group_sources, require_same_groups
from plait.checkpoint.optimizer_state import is_number, place_of_number, restore_options
from plait.checkpoint.rank_contents import (
    Checkpointable,
    parameter_key,
    replicated_layout,
    state_key,
    state_keys,
)
from plait.checkpoint.tensor_file import BETWEEN_SYNCS, Portion, damage, portions
from plait.comm.collectives import all_reduce
from plait.comm.mesh import Mesh
from plait.comm.text import all_gather_text, broadcast_text
from plait.errors import CheckpointError
from plait.layout import Layout


def load(engine: Checkpointable, optimizer: torch.optim.Optimizer | None, path: str | Path) -> dict[str, Any]:
    """Let an engine go on where the one that wrote the checkpoint `path` was; gives the `state` in it.

    On all ranks, whatever plan, number of ranks and dtypes the two have. `path` may be a folder of
    checkpoints: then the newest complete one is meant. With an optimizer, of the class that was saved, its
    state and the options of its groups are those of the checkpoint; with None only the model is loaded.
    Memory: what this rank holds, and one tensor. Raises `CheckpointError` on all ranks, before anything is
    changed, where there is no checkpoint, one that is damaged (the one before it is named), one of another
    model (the tensors are named), or an optimizer of other parameters or groups; and `PlanError` for one that
    cannot work under the plan. Communication: the path, the groups' options and what ranks find wrong, over
    `world`.
    """
    if optimizer is not None:
        engine.check_optimizer(optimizer)
    mesh = engine.mesh
    folder = Path(_agreed_path(Path(path), mesh))
    manifest, flaw = None, None
    try:
        manifest = open_manifest(folder)
        require_compatible(manifest, engine, optimizer)
    except CheckpointError as error:
        flaw = error
    _raise_together(flaw, mesh)
    assert manifest is not None
    if optimizer is not None:
        _compare_groups(engine, optimizer, manifest)
    _look_through(folder, manifest, mesh)
    _in_rounds(_read(engine, optimizer, manifest, folder), mesh)
    if manifest.run:  # not in what others wrote
        engine.run_state = applicable_run_state(engine.plan, manifest)
    return dict(manifest.state)


def _compare_groups(engine: Checkpointable, optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    """Raise CheckpointError, on all ranks, unless groups are those of the saved optimizer."""
    names = {id(piece): name for name, piece in engine.named_parameters()}
    saved = manifest.optimizer or {}
    sources = json.dumps(group_sources(optimizer, names, saved))
    ranks = all_gather_text(sources, engine.mesh.group("world"), engine.mesh.device)
    require_same_groups(map(json.loads, ranks), saved)


def open_manifest(folder: Path) -> Manifest:
    """The manifest in a folder. CheckpointError where there is none, or a damaged one; names an older one."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        if not error.damaged:
            raise
        reason = str(error).removeprefix(f"{folder / FILE} ").removesuffix(TAKE_ANOTHER)
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {FILE} {reason}: {_way_out(folder)}.", damaged=True
        ) from None


def _way_out(folder: Path) -> str:
    before = previous_checkpoint(folder)
    return f"load {before}, the one before it" if before else "take another checkpoint"


def require_undamaged(folder: Path, some: Iterable[Portion]) -> None:
    """CheckpointError where one of the portions is not, bit by bit, what was written; names an older one."""
    for one in some:
        found = damage(folder, one)
        if found is not None:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: {one.file.name} {found}: {_way_out(folder)}.",
                damaged=True,
            )


def _look_through(folder: Path, manifest: Manifest, mesh: Mesh) -> None:
    """Every rank a portion, then all again: none waits longer for the others than one portion takes."""
    everything = portions(manifest.files)
    for first in range(0, len(everything), mesh.world):
        flaw = None
        try:
            require_undamaged(folder, everything[first : first + mesh.world][mesh.rank : mesh.rank + 1])
        except CheckpointError as error:
            flaw = error
        _raise_together(flaw, mesh)


def _agreed_path(path: Path, mesh: Mesh) -> str:
    """The checkpoint that rank 0 finds, on all ranks. CheckpointError, on all, where it finds none."""
    found = ""
    if mesh.rank == 0:
        try:
            found = f"+{resolve(path)}"
        except (CheckpointError, OSError) as error:
            found = f"-{error}"
    found = broadcast_text(found, mesh.group("world"), mesh.device)
    if found.startswith("-"):
        raise CheckpointError(found[1:])
    return found[1:]


def _raise_together(flaw: CheckpointError | None, mesh: Mesh) -> None:
    """On all ranks the first error that any has."""
    own = "" if flaw is None else json.dumps([str(flaw), flaw.damaged])
    flaws = [told for told in all_gather_text(own, mesh.group("world"), mesh.device) if told]
    if flaws:
        message, damaged = json.loads(flaws[0])
        raise CheckpointError(message, damaged=damaged)


def _in_rounds(sizes: Iterator[int], mesh: Mesh) -> None:
    """Go through what this rank reads, of which `sizes` gives the bytes: after some of them all ranks meet.

    So none waits longer for the others than one round takes, however much more these have to read.
    """
    done, everyone = False, mesh.group("world")
    while not done:
        flaw, read, own = None, 0, False
        try:
            while read < BETWEEN_SYNCS and not own:
                size = next(sizes, None)
                read, own = read + (size or 0), size is None
        except CheckpointError as error:
            flaw = CheckpointError(f"{error} Part of the model was already read: it is of no use.")
        _raise_together(flaw, mesh)
        left = torch.tensor(int(not own), device=mesh.device)
        done = not all_reduce(left, everyone, "max", checked=False).about("whether all is read").wait().item()


@torch.no_grad()
def _read(
    engine: Checkpointable, optimizer: torch.optim.Optimizer | None, manifest: Manifest, folder: Path
) -> Iterator[int]:
    """Read everything that this rank holds; gives the bytes of each tensor, when it is there."""
    boxes, where = BoxReader(folder, manifest), engine.mesh.coordinate
    states = state_keys(manifest.tensors)
    saved = manifest.optimizer or {}
    groups = [] if optimizer is None else optimizer.param_groups
    group_of = {id(piece): group for group in groups for piece in group["params"]}
    for name, piece in engine.named_parameters():
        layout = engine.layouts[name]
        boxes.fill(piece.detach(), parameter_key(name), layout, where)
        yield piece.nbytes
        if optimizer is not None and id(piece) in group_of:
            optimizer.state.pop(piece, None)  # before there is memory for what comes in its place
            kept: dict[str, Any] = dict(saved["plain"].get(name, {}))
            for key in states.get(name, ()):
                told = state_key(name, key)
                known, group = manifest.tensors[told], group_of[id(piece)]
                follows = known.dtype == manifest.tensors[parameter_key(name)].dtype
                empty, of = _empty_state(key, piece, layout, known, group, follows=follows)
                boxes.fill(empty, told, of, where)
                yield empty.nbytes
                kept[key] = empty
            if kept:
                optimizer.state[piece] = kept
    for name, buffer in engine.named_buffers():
        whole = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)  # as it may be a view
        boxes.fill(whole, parameter_key(name), Layout(tuple(buffer.shape), {"world": 1}), {"world": 0})
        buffer.copy_(whole)
        yield whole.nbytes
    if optimizer is not None:
        names = {id(piece): name for name, piece in engine.named_parameters()}
        restore_options(optimizer, names, saved)


def _empty_state(
    key: str,
    piece: nn.Parameter,
    layout: Layout,
    known: TensorEntry,
    group: Mapping[str, Any],
    *,
    follows: bool,
) -> tuple[Tensor, Layout]:
    """Memory for what an optimizer keeps of a parameter under `key`, and how that is cut.

    `follows`: it had the dtype of the parameter, and has that of the piece now.
    """
    shape, dtype = known.shape, getattr(torch, known.dtype)
    whole = replicated_layout(layout, shape)
    if is_number(key, shape, layout.shape):
        return torch.empty((), dtype=dtype, device=place_of_number(key, group, piece)), whole
    dtype = piece.dtype if follows else dtype
    if shape == layout.shape:
        return torch.empty_like(piece, dtype=dtype, requires_grad=False), layout
    assert tuple(piece.shape) == layout.shape, "see require_states_fit"
    return torch.empty(shape, dtype=dtype, device=piece.device), whole
