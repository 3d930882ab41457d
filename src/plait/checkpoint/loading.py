"""`load`: read a checkpoint, saved under any layout, into an engine of any layout.

Before anything is changed, the ranks check every byte of the files, each a share of them, and that all
tensors of the model are there. Then each rank reads its own shards, box by box.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from plait.checkpoint.box_reader import BoxReader, open_manifest, require_undamaged
from plait.checkpoint.compatibility import (
    Sources,
    applicable_run_state,
    group_sources,
    linears_change,
    precision_change,
    require_compatible,
    require_same_groups,
)
from plait.checkpoint.folders import resolve
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.optimizer_options import (
    Options,
    differences,
    option_line,
    require_option_types,
    require_state_for_options,
    restore_options,
)
from plait.checkpoint.optimizer_set import GivenOptimizers, OptimizerSet
from plait.checkpoint.optimizer_state import empty_state, layout_of_state
from plait.checkpoint.rank_contents import (
    Checkpointable,
    parameter_key,
    require_engine,
    state_key,
    state_keys,
)
from plait.checkpoint.tensor_file import BETWEEN_SYNCS, Portion, portions
from plait.errors import CheckpointError, terminal_text
from plait.plan.argument_checks import require_choice, require_instance
from plait.plan.layout.layout import Box, Layout
from plait.plan.layout.shards import full_box, shard_boxes
from plait.ranks.collectives import all_reduce
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import all_gather_text, first_nonempty_text


@dataclass(frozen=True)
class Loaded:
    """Result of `load_checkpoint`: the user's state, and the differences from the saved run."""

    state: dict[str, Any]
    options: dict[str, tuple[Any, Any]]
    """By name: the given value, and the saved one."""
    precision: str = ""
    """Sentences where parameters were updated in another precision, or linears cast otherwise; else ""."""


def load(
    engine: Checkpointable, optimizer: GivenOptimizers, path: str | Path, *, options: Options = "saved"
) -> dict[str, Any]:
    """Load the checkpoint `path` into an engine and an optimizer, and return the user's `state` in it.

    Called on all ranks. Plan, number of ranks and dtypes may differ from those of the engine that saved it.
    `path` may be a folder of checkpoints: then its newest complete one is loaded. The optimizer, or each in a
    list of several, must be of the saved class, and gets the saved state; with None only the model is loaded.
    `options`: those of its groups, such as `lr`, are the "saved" ones, as with torch's `load_state_dict`; or
    the "given" ones stay, but for a learning rate that a scheduler of torch has moved. Rank 0 prints which
    differ, and where parameters were updated in another precision when they were saved, or linears cast to
    float8 otherwise. Memory: this rank's shards and one tensor. Raises `CheckpointError` on all ranks, before
    anything is changed, where the checkpoint is missing, damaged (the message names the one before it) or of
    another model (it names the tensors), or the optimizer has other parameters or groups, or options for
    which state is missing; `PlanError` for an optimizer that does not work under the plan. Communication: the
    path, the options of groups and error messages, over `world`.
    """
    loaded = load_checkpoint(engine, optimizer, path, options)
    if loaded.options and engine.mesh.rank == 0:
        print(terminal_text(option_line(loaded.options, options)))
    if loaded.precision and engine.mesh.rank == 0:
        print(terminal_text(loaded.precision))
    return loaded.state


def load_checkpoint(
    engine: Checkpointable, optimizer: GivenOptimizers, path: str | Path, options: Options
) -> Loaded:
    """Load a checkpoint as `load` does, but return the differences instead of printing them."""
    require_instance("the path of a checkpoint", path, (str, Path), "give a path", CheckpointError)
    optimizers, mesh = checked_optimizers(engine, optimizer, options), engine.mesh
    with raising_on_all_ranks(mesh):
        found = str(resolve(Path(path))) if mesh.rank == 0 else ""
    folder = Path(first_nonempty_text(found, mesh.group("world"), mesh.device))
    with raising_on_all_ranks(mesh):
        manifest = open_manifest(folder)
    return load_files(engine, optimizers, manifest, folder, options, range(mesh.world))


def checked_optimizers(
    engine: Checkpointable, optimizer: GivenOptimizers, options: Options
) -> OptimizerSet | None:
    """Check the arguments of `load`; return the given optimizers as an `OptimizerSet`, or None for None.

    Raises CheckpointError, and PlanError for an optimizer that does not work under the engine's plan.
    """
    require_engine(engine)
    require_choice("options", options, get_args(Options), CheckpointError)
    optimizers = OptimizerSet.of(optimizer)
    for one in () if optimizers is None else optimizers.members:
        engine.check_optimizer(one)
    return optimizers


def load_files(
    engine: Checkpointable,
    optimizers: OptimizerSet | None,
    manifest: Manifest,
    folder: Path,
    options: Options,
    checked_by: Sequence[int],
) -> Loaded:
    """Read the files in `folder` that `manifest` lists into engine and optimizers. All ranks call it.

    Otherwise as `load`. `checked_by`: the ranks that see the same folder, this one among them: each checks a
    share of the files.
    """
    mesh, shards = engine.mesh, dict(engine.named_parameters())
    names = {id(shard): name for name, shard in shards.items()}
    saved = manifest.optimizer or {}
    with raising_on_all_ranks(mesh):
        require_compatible(manifest, engine, optimizers)
        if optimizers is not None:
            require_option_types(optimizers, names, saved, options)
        if optimizers is not None and options == "given":
            require_state_for_options(optimizers, names, saved, state_keys(manifest.tensors))
    unlike, precision = dict[str, tuple[Any, Any]](), ""
    if optimizers is not None:
        unlike = _compare_groups(group_sources(optimizers, names, saved), saved, mesh, options)
        changes = precision_change(manifest, shards), linears_change(manifest.plan, engine.shard_plan.plan)
        precision = " ".join(filter(None, changes))
    share = portions(manifest.files)[checked_by.index(mesh.rank) :: len(checked_by)]
    _do_in_rounds(_check_files(folder, share), mesh)
    remark = " The model is partly overwritten: do not use it."
    _do_in_rounds(_read(engine, optimizers, manifest, folder), mesh, remark)
    if optimizers is not None:
        restore_options(optimizers, names, saved, options)
        optimizers.read_parameters()
    if manifest.run:  # empty in checkpoints that were imported
        engine.run_state = applicable_run_state(engine.shard_plan.plan, manifest)
    return Loaded(dict(manifest.state), unlike, precision)


def _compare_groups(
    sources: Sources, saved: Mapping[str, Any], mesh: Mesh, options: Options
) -> dict[str, tuple[Any, Any]]:
    """Return the optimizer options that differ from the saved ones: name → (value now, saved value).

    Raises CheckpointError, on all ranks, where saved options count and groups with different ones were merged
    or split. `sources`: the `group_sources` of this rank.
    """
    texts = all_gather_text(json.dumps(sources), mesh.group("world"), mesh.device)
    ranks = [json.loads(text) for text in texts]
    if options == "saved":
        require_same_groups(ranks, saved)
    return differences(ranks, saved)


def _check_files(folder: Path, share: Iterable[Portion]) -> Iterator[int]:
    """Check portions of files for damage; yield after each the most bytes that it has."""
    for portion in share:
        require_undamaged(folder, [portion])
        yield BETWEEN_SYNCS


@contextmanager
def raising_on_all_ranks(mesh: Mesh, remark: str = "") -> Iterator[None]:
    """Context: if any rank raises CheckpointError or OSError, all raise the error of the lowest such rank."""
    own = ""
    try:
        yield
    except CheckpointError as error:
        own = json.dumps([f"{error}{remark}", error.damaged])
    except OSError as error:
        reason = f"{error.filename} cannot be used ({error.strerror or error}): mend it, or the disk."
        own = json.dumps([f"{reason}{remark}", False])
    if first := first_nonempty_text(own, mesh.group("world"), mesh.device):
        message, damaged = json.loads(first)
        raise CheckpointError(message, damaged=damaged)


def _do_in_rounds(sizes: Iterator[int], mesh: Mesh, remark: str = "") -> None:
    """Run the generator `sizes`, which reads and yields bytes read; synchronise the ranks between its reads.

    No rank waits for the others longer than one round, even where they have much more to read. `remark`: for
    errors, which all ranks raise.
    """
    all_done, world = False, mesh.group("world")
    while not all_done:
        read, done = 0, False
        with raising_on_all_ranks(mesh, remark):
            while read < BETWEEN_SYNCS and not done:
                size = next(sizes, None)
                read, done = read + (size or 0), size is None
        left = torch.tensor(int(not done), device=mesh.device)
        reduced = all_reduce(left, world, "max", checked=False).about("whether all ranks have read").wait()
        all_done = not reduced.item()


@torch.no_grad()
def _read(
    engine: Checkpointable, optimizers: OptimizerSet | None, manifest: Manifest, folder: Path
) -> Iterator[int]:
    """Read this rank's parameters, optimizer state and buffers; yield the bytes of each tensor when read."""
    boxes, where = BoxReader(folder, manifest), engine.mesh.coordinate
    states = state_keys(manifest.tensors)
    saved = manifest.optimizer or {}
    groups = [] if optimizers is None else optimizers.param_groups
    group_of = {id(shard): group for group in groups for shard in group["params"]}
    for name, shard in engine.named_parameters():
        layout = engine.shard_plan.layouts[name]
        boxes.fill(shard.detach(), parameter_key(name), layout, where)
        yield shard.nbytes
        if optimizers is not None and id(shard) in group_of:
            owner = optimizers.state_rank(shard)
            optimizers.replace_state(shard, {})  # free the memory first
            state: dict[str, Any] = dict(saved["plain"].get(name, {}))
            if owner not in (None, engine.mesh.rank):
                continue
            for key in states.get(name, ()):
                full_key = state_key(name, key)
                entry, group = manifest.tensors[full_key], group_of[id(shard)]
                same_dtype = entry.dtype == manifest.tensors[parameter_key(name)].dtype
                kind = key, entry.shape, entry.torch_dtype
                whole = owner is not None
                empty, state_layout = empty_state(
                    *kind, shard, layout, group, same_dtype=same_dtype, whole=whole
                )
                boxes.fill(empty, full_key, state_layout, where)
                yield empty.nbytes
                state[key] = empty
            optimizers.replace_state(shard, state)
    for name, buffer in engine.named_buffers():
        values = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)  # a buffer may be a view
        boxes.fill(values, parameter_key(name), Layout(tuple(buffer.shape), {"world": 1}), {"world": 0})
        buffer.copy_(values)
        yield values.nbytes


def needed_boxes(
    engine: Checkpointable, optimizers: OptimizerSet | None, manifest: Manifest
) -> dict[str, list[Box]]:
    """Return the boxes that this rank reads from a checkpoint with this manifest, by tensor."""
    coordinate, layouts = engine.mesh.coordinate, engine.shard_plan.layouts
    states = {} if optimizers is None else state_keys(manifest.tensors)
    wanted: list[tuple[str, Layout]] = []
    for name, shard in engine.named_parameters():
        wanted.append((parameter_key(name), layouts[name]))
        owner = None if optimizers is None else optimizers.state_rank(shard)
        for key in states.get(name, ()) if owner in (None, engine.mesh.rank) else ():
            full = state_key(name, key)
            shape = manifest.tensors[full].shape
            whole = Layout(shape, layouts[name].axis_degrees)
            wanted.append((full, layout_of_state(key, shape, layouts[name]) if owner is None else whole))
    found = {key: [part.box for part in shard_boxes(layout, coordinate)] for key, layout in wanted}
    return found | {parameter_key(name): [full_box(one.shape)] for name, one in engine.named_buffers()}
