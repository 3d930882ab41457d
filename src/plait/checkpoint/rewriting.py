"""`convert`: write a checkpoint as one file, as files of limited size, or as another plan would save it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path

from plait.checkpoint.compatibility import applicable_run_state, require_model
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import atomic_folder, write_manifest
from plait.checkpoint.full_tensors import FullTensors
from plait.checkpoint.manifest import Manifest, TensorEntry
from plait.checkpoint.optimizer_state import layout_of_state
from plait.checkpoint.rank_contents import WriterAssignment, parameter_key, state_key, state_keys
from plait.checkpoint.save_task import file_name
from plait.checkpoint.tensor_file import BoxToWrite, write_file, write_files
from plait.plan.axes import sizes_of_plan
from plait.plan.layout.layout import Layout
from plait.plan.layout.shards import shard_boxes
from plait.plan.shard_plan import ShardPlan, replica_ranks


def convert(
    source: str | Path, target: str | Path, *, max_bytes: int | None = None, disk: Disk | None = None
) -> None:
    """Write the checkpoint `source` to the new folder `target`, each tensor whole, however it was sharded.

    Runs in one process, without ranks. `max_bytes` limits the size of a file, unless the file holds a single
    tensor that is larger; None: one file. Parameters, optimizer, `state` and all else are copied bit by bit.
    Memory: one tensor. Raises `CheckpointError` where the source is damaged or the target exists.
    """
    tensors = FullTensors(Path(source))
    write_checkpoint(
        Path(target), tensors.manifest, tensors.items(), max_bytes=max_bytes, disk=disk or Disk()
    )


def write_checkpoint(
    target: Path, head: Manifest, items: Sequence[BoxToWrite], *, max_bytes: int | None, disk: Disk
) -> None:
    """Write `items` as a checkpoint to the new folder `target`, from one process.

    `head`: the manifest, whose files are not listed yet.
    """
    with atomic_folder(target, disk) as folder:
        files = write_files(folder, "tensors", items, max_bytes=max_bytes, disk=disk)
        write_manifest(folder, replace(head, files=tuple(files)), disk)


def convert_for(source: str | Path, target: str | Path, shard_plan: ShardPlan) -> None:
    """Write the checkpoint `source` to the new folder `target` in the files that a plan's ranks would save.

    `shard_plan`: `plait.engine.blueprint.build_blueprint(model, plan).shard_plan`. A rank of that plan finds
    all that it holds in its own file, except for shards that another rank saves for it. Runs in one process.
    Memory: one box. Raises `CheckpointError` as `convert`, and for a checkpoint of another model.
    """
    tensors, disk = FullTensors(Path(source)), Disk()
    manifest, plan = tensors.manifest, shard_plan.plan
    require_model(manifest, shard_plan.shapes, shard_plan.aliases)
    head = replace(manifest, plan=asdict(plan), run=applicable_run_state(plan, manifest))
    with atomic_folder(Path(target), disk) as folder:
        files = (
            write_file(folder / file_name(rank), items, disk)
            for rank, items in enumerate(_boxes_by_rank(shard_plan, tensors))
        )
        write_manifest(folder, replace(head, files=tuple(files)), disk)


def _boxes_by_rank(shard_plan: ShardPlan, tensors: FullTensors) -> list[list[BoxToWrite]]:
    """Return for each rank of the plan the boxes (ranges of the tensors) that it would save."""
    plan = shard_plan.plan
    sizes = sizes_of_plan(plan)
    found: list[list[BoxToWrite]] = [[] for _ in range(plan.world)]
    writers = WriterAssignment()
    for name, layout, stages in _layouts(shard_plan, tensors.manifest.tensors):
        dtype = tensors.dtype(name)
        for coordinate in layout.coordinates():
            if coordinate != layout.owner(coordinate):
                continue  # a replica of an earlier shard
            where = dict(zip(layout.axes, coordinate, strict=True))
            boxes = [part.box for part in shard_boxes(layout, where)]
            size = sum(prod(box.sizes) for box in boxes) * dtype.itemsize
            writer = writers.assign(replica_ranks(layout, where, stages, sizes), size)
            found[writer] += (
                BoxToWrite(name, box, dtype, partial(tensors.read_box, name, box)) for box in boxes
            )
    return found


def _layouts(
    shard_plan: ShardPlan, saved: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, Layout, tuple[int, ...]]]:
    """Yield key, layout and stages (indices along `pp`) of each saved tensor, in the order of saving."""
    states, owners = state_keys(saved), shard_plan.owners
    for name, layout in shard_plan.layouts.items():
        yield parameter_key(name), layout, owners[name]
        for key in states.get(name, ()):
            full = state_key(name, key)
            yield full, layout_of_state(key, saved[full].shape, layout), owners[name]
    any_layout = next(iter(shard_plan.layouts.values()))
    for name, shape in shard_plan.buffer_shapes.items():
        yield parameter_key(name), Layout(shape, any_layout.axis_degrees), owners[name]
    for name in map(parameter_key, shard_plan.aliases):
        if name in saved:  # torch saves a tied parameter under each of its names
            yield name, Layout(saved[name].shape, any_layout.axis_degrees), (0,)
