"""`describe`: what `run.json` says of a run: environment, stages, layouts, predicted memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from math import prod

import torch

from plait.blueprint import Blueprint
from plait.comm.mesh import Mesh
from plait.comm.world import find_world
from plait.device import accelerator_versions, is_accelerator, name_of
from plait.footprint.memory_report import Memory
from plait.layout import Flat, Layout
from plait.report.description import (
    FORMAT,
    PlannedLayer,
    PlannedTensor,
    PredictedRank,
    RunDescription,
    TensorPiece,
)
from plait.report.events import now
from plait.train.config import Config

MOST_TENSORS = 12
"""Tensors of different shape or layout that are described, the largest first."""


def describe(
    config: Config, blueprint: Blueprint, mesh: Mesh, memory: Memory | None, lines: tuple[str, ...]
) -> RunDescription:
    """Return the description of a run that begins; `lines` are those of its banner."""
    return RunDescription(
        format=FORMAT,
        started=now(),
        title=config.run.dir.resolve().name,
        lines=lines,
        environment=dict(_environment(config, mesh)),
        changed_fields=tuple(_changed_fields(config)),
        accelerated=is_accelerator(mesh.device),
        mesh=mesh.sizes,
        strategy=blueprint.plan.strategy,
        stage_ranks=tuple(blueprint.schedule.rank_of),
        layers=tuple(_layers(blueprint)),
        tensors=tuple(_tensors(blueprint)),
        memory=() if memory is None else tuple(_predicted(memory)),
    )


def _environment(config: Config, mesh: Mesh) -> Iterator[tuple[str, str]]:
    for package in ("plait", "torch", "numpy", "safetensors"):
        yield package, metadata.version(package)
    yield "Python", platform.python_version()
    yield "system", platform.platform(terse=True)
    yield "processor", f"{platform.machine()}, {os.cpu_count()} cores"
    accelerated = is_accelerator(mesh.device)
    yield "device of rank 0", name_of(mesh.device) if accelerated else "CPU"
    if accelerated:
        yield from accelerator_versions().items()
    world = find_world()
    launcher = "plait" if world is None else world.launcher
    yield "ranks", f"{mesh.world} {config.run.ranks_as}, started by {launcher}"
    yield "threads of a rank", str(torch.get_num_threads())
    on_one_host = mesh.group("world").on_one_host
    yield "communication", "NCCL" if mesh.uses_nccl else "within one host" if on_one_host else "Gloo"


def _changed_fields(config: Config) -> Iterator[str]:
    for (section, values), (_, defaults) in zip(config, Config(), strict=True):
        for (name, value), (_, default) in zip(values, defaults, strict=True):
            if value != default:
                yield f"{section}.{name}"


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
    """Yield one parameter of each shape and layout, with the number of its like; the largest first."""
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
