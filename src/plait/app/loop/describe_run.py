"""`describe`: the content of `run.json`: environment, stages, layouts and predicted memory of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from threading import current_thread, main_thread

import torch

from plait.app.loop.run_folder import new_run_id
from plait.app.loop.run_origin import command_line, commit_of
from plait.engine.blueprint import Blueprint
from plait.engine.engine import Engine
from plait.estimate.memory.memory_report import Memory
from plait.pictures.report.events import now
from plait.pictures.report.run_description import (
    FORMAT,
    PlannedLayer,
    PlannedTensor,
    PredictedRank,
    RunDescription,
    TensorPiece,
)
from plait.plan.layout.layout import Flat, Layout
from plait.plan.plan import Plan
from plait.ranks.device import accelerator_versions, is_accelerator, name_of
from plait.ranks.mesh import Mesh
from plait.ranks.world import find_world
from plait.version import version_of

MOST_TENSORS = 12
"""Tensors of different shape or layout that are described, the largest first."""


def describe(
    engine: Engine,
    title: str,
    lines: Sequence[str] = (),
    *,
    rows: int = 0,
    memory: Memory | None = None,
    seconds: float | None = None,
    changed_fields: Sequence[str] = (),
    notes: str = "",
) -> RunDescription:
    """Return the description of a starting run; `lines`: sentences on model, data and plan.

    `rows`: of a global batch. `memory`, `seconds`: the predicted ones of a step. `changed_fields`: those of a
    configuration that differ from their default. `notes`: text of the user.
    """
    blueprint, mesh = engine.blueprint, engine.mesh
    return RunDescription(
        format=FORMAT,
        started=now(),
        title=title,
        lines=tuple(lines),
        environment=dict(_environment(mesh)),
        changed_fields=tuple(changed_fields),
        accelerated=is_accelerator(mesh.device),
        mesh=mesh.sizes,
        strategy=blueprint.plan.strategy,
        stage_ranks=tuple(blueprint.schedule.rank_of),
        layers=tuple(_layers(blueprint)),
        tensors=tuple(_tensors(blueprint)),
        memory=() if memory is None else tuple(_predicted(memory)),
        rows=rows,
        predicted_seconds=seconds,
        id=new_run_id(),
        notes=notes,
    )


def plan_line(plan: Plan, mesh: Mesh, rows: int) -> str:
    """Return a sentence on a plan: ranks by axis, sharding, schedule, the `rows` of a global batch."""
    ranks = f"{plan.world} ranks" if plan.world > 1 else "1 rank"
    context = f" × cp {plan.cp}" if plan.cp > 1 else ""
    degrees = f"pp {plan.pp} × dp {plan.dp}{context} × tp {plan.tp}"
    batches = f"{plan.dp} × {plan.microbatches} micro-batch{'es' * (plan.dp * plan.microbatches > 1)}"
    return (
        f"Plan: {ranks} on {mesh.device.type} ({degrees}{_sharding(plan)}), "
        f"schedule {plan.schedule}, {rows} sequences a step in {batches}."
    )


def _sharding(plan: Plan) -> str:
    """Return what is sharded over `dp` and `cp`, and what is offloaded to the CPU, as text, or ""."""
    if not plan.shards:
        return ""
    copies = f" in {plan.replicate} copies" if plan.replicate > 1 else ""
    offload = f", offload {plan.offload}" if plan.offload != "none" else ""
    return f", strategy {plan.strategy}{copies}, reduced {plan.reduce}{offload}"


def _environment(mesh: Mesh) -> Iterator[tuple[str, str]]:
    for package in ("plait", "torch", "numpy", "safetensors"):
        yield package, version_of(package)
    yield "Python", platform.python_version()
    yield "system", platform.platform(terse=True)
    yield "processor", f"{platform.machine()}, {os.cpu_count()} cores"
    accelerated = is_accelerator(mesh.device)
    yield "device of rank 0", name_of(mesh.device) if accelerated else "CPU"
    if accelerated:
        yield from accelerator_versions().items()
    world = find_world()
    launcher = "plait" if world is None else world.launcher
    runs_as = "processes" if current_thread() is main_thread() else "threads"
    yield "command", command_line()
    if commit := commit_of(Path.cwd()):
        yield "commit", commit
    yield "ranks", f"{mesh.world} {runs_as}, started by {launcher}"
    yield "threads of a rank", str(torch.get_num_threads())
    on_one_host = mesh.group("world").on_one_host
    yield "communication", "NCCL" if mesh.uses_nccl else "within one host" if on_one_host else "Gloo"


def _layers(blueprint: Blueprint) -> Iterator[PlannedLayer]:
    elements: dict[str, int] = {}
    for name, layout in blueprint.layouts.items():
        first = blueprint.sequence.users[name][0]
        path = blueprint.sequence.layers[first].path
        elements[path] = elements.get(path, 0) + prod(layout.shape)
    for stage, numbers in enumerate(blueprint.stage_layers):
        for number in numbers:
            layer = blueprint.sequence.layers[number]
            yield PlannedLayer(layer.path, type(layer.module).__name__, elements.get(layer.path, 0), stage)


def _tensors(blueprint: Blueprint) -> Iterator[PlannedTensor]:
    """Yield one parameter for each distinct shape and layout, largest first, with how many have the same."""
    alike: dict[Layout, list[str]] = {}
    for name, layout in blueprint.layouts.items():
        alike.setdefault(layout, []).append(name)
    for layout in sorted(alike, key=lambda layout: (-prod(layout.shape), -len(layout.shape)))[:MOST_TENSORS]:
        names = alike[layout]
        ranks = sorted({rank for name in names for rank in blueprint.owners[name]})
        pieces = tuple(_piece(layout, index) for index in range(layout.axis_degrees["tp"]))
        yield PlannedTensor(names[0], layout.shape, tuple(ranks), pieces, len(names))


def _piece(layout: Layout, tp: int) -> TensorPiece:
    """Return the boxes of a rank of `tp`, and the intervals of its ranks of `shard` and `cp`, if any."""
    degrees = layout.axis_degrees
    where = dict.fromkeys(layout.axes, 0) | {"tp": tp}
    boxes = tuple((box.offsets, box.sizes) for box in layout.boxes(where))
    if not any(isinstance(placement, Flat) for placement in layout.placements):
        return TensorPiece(boxes)
    places: list[Mapping[str, int]] = [
        where | {"shard": shard, "cp": cp} for shard in range(degrees["shard"]) for cp in range(degrees["cp"])
    ]
    intervals = [layout.interval(place) or range(0) for place in places]
    return TensorPiece(boxes, tuple((interval.start, interval.stop) for interval in intervals))


def _predicted(memory: Memory) -> Iterator[PredictedRank]:
    for rank in memory.ranks:
        uses = {category.value: size for category, size in rank.at_peak.items() if size}
        yield PredictedRank(rank.rank, rank.most, rank.at_rest, uses)
