"""`describe`: the contents of `run.json`: command, environment, stages, layouts, predicted memory."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path
from threading import current_thread, main_thread

import torch

from plait.engine.blueprint import Blueprint
from plait.engine.engine import Engine
from plait.estimate.memory.memory_report import Memory
from plait.package import version_of
from plait.pictures.report.run_json import (
    FORMAT,
    PlannedLayer,
    PlannedTensor,
    PredictedRank,
    RunDescription,
    TensorShard,
)
from plait.pictures.report.run_record import now
from plait.plan.axes import AXES, LAYER_AXES
from plait.plan.layout.layout import Flat, Layout
from plait.plan.plan import Plan
from plait.ranks.accelerator import accelerator_versions, is_accelerator, name_of
from plait.ranks.launcher_environment import find_world
from plait.ranks.mesh import Mesh

HIDDEN = "…"
"""In place of a value that may be a secret."""
_SECRET = re.compile(r"(key|token|password|passwd|passphrase|pwd|secret|credential|auth)s?$")
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_ACCOUNT = re.compile(r"(?<=://)[^/@\s]+@")
_OBJECT = re.compile(r"[0-9a-f]{40,64}")


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Return the command of this process as text, by default `sys.argv`, without values that are secrets.

    Left out are values of options and variables named like key, token or password, and what stands before
    the @ of an address. A secret that is an argument by itself is not known as one.
    """
    given = sys.argv if arguments is None else arguments
    name, rest = (Path(given[0]).name, given[1:]) if given else ("", [])
    return shlex.join([name, *_without_secrets(rest)])


def _without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    is_value_of_secret = False
    for argument in arguments:
        is_option = argument.startswith("-")
        if is_value_of_secret and not is_option:
            is_value_of_secret = False
            yield HIDDEN
            continue
        name, equals, value = argument.partition("=")
        names_secret = _names_secret(name, value if equals else None)
        is_value_of_secret = is_option and not equals and names_secret
        yield f"{name}={HIDDEN}" if equals and names_secret else _ACCOUNT.sub(f"{HIDDEN}@", argument)


def _names_secret(name: str, value: str | None) -> bool:
    """Return whether an option or variable of this name holds a secret; a number of tokens is none."""
    if re.fullmatch(r"[\w.-]+", name) is None or (value is not None and value.isdecimal()):
        return False
    words = (word.lower() for word in _WORD.findall(name))
    return any(_SECRET.search(word) is not None and word != "tokens" for word in words)


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in `folder` or above it, by git's files; "" if there is none.

    No program is started: git may run commands that the folder names.
    """
    for place in (folder.resolve(), *folder.resolve().parents):
        with suppress(OSError, ValueError):
            if (place / ".git").exists():
                return _head(_git_folder(place / ".git"))
    return ""


def _git_folder(path: Path) -> Path:
    """Return the folder of git's files; of a worktree or submodule a file names it."""
    if path.is_dir():
        return path
    return path.parent / path.read_text(encoding="utf-8").removeprefix("gitdir:").strip()


def _head(git: Path) -> str:
    """Return the commit of HEAD. Raises OSError or ValueError where the files are of another form."""
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return _checked(head)
    reference = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    common = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
    for place in (git, common):
        if ".." not in reference and (place / reference).is_file():
            return _checked((place / reference).read_text(encoding="utf-8").strip())
    packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
    found = (line.split(" ", 1) for line in packed if line.endswith(f" {reference}"))
    return next((_checked(commit) for commit, name in found if name == reference), "")


def _checked(commit: str) -> str:
    if _OBJECT.fullmatch(commit) is None:
        raise ValueError("no commit")
    return commit


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
    """Return the contents of `run.json` for a starting run; `lines`: sentences on model, data and plan.

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
        mesh={axis: mesh.sizes[axis] for axis in AXES},
        strategy=blueprint.plan.strategy,
        stage_ranks=tuple(blueprint.schedule.rank_of),
        layers=tuple(_layers(blueprint)),
        tensors=tuple(_tensors(blueprint)),
        memory=() if memory is None else tuple(_predicted(memory)),
        rows=rows,
        predicted_seconds=seconds,
        id=secrets.token_hex(4),
        notes=notes,
    )


def plan_line(plan: Plan, mesh: Mesh, rows: int) -> str:
    """Return a sentence on a plan: ranks by axis, sharding, schedule, the `rows` of a global batch."""
    ranks = f"{plan.world} ranks" if plan.world > 1 else "1 rank"
    context = f" × cp {plan.cp}" if plan.cp > 1 else ""
    degrees = f"pp {plan.pp} × dp {plan.dp}{context} × tp {plan.tp}"
    if plan.divides_experts:
        degrees += f", experts over ep {plan.ep} × etp {plan.etp}"
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
        divided = [axis for axis in layout.axes if axis in LAYER_AXES]
        shards = tuple(_shard(layout, where) for where in _places(layout, divided))
        yield PlannedTensor(names[0], layout.shape, tuple(ranks), shards, len(names))


def _shard(layout: Layout, where: Mapping[str, int]) -> TensorShard:
    """Return the boxes at `where`, and the intervals of the ranks between which a strategy shards them."""
    boxes = tuple((box.offsets, box.sizes) for box in layout.boxes(where))
    flat = [axis for axis, placement in layout.axis_placements.items() if isinstance(placement, Flat)]
    if not flat:
        return TensorShard(boxes)
    intervals = [layout.interval(place) or range(0) for place in _places(layout, flat)]
    return TensorShard(boxes, tuple((interval.start, interval.stop) for interval in intervals))


def _places(layout: Layout, moving: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield all coordinates along the axes `moving`, row-major, at index 0 along the other axes."""
    for indices in product(*(range(layout.axis_degrees[axis]) for axis in moving)):
        yield dict.fromkeys(layout.axes, 0) | dict(zip(moving, indices, strict=True))


def _predicted(memory: Memory) -> Iterator[PredictedRank]:
    for rank in memory.ranks:
        uses = {category.value: size for category, size in rank.at_peak.items() if size}
        yield PredictedRank(rank.rank, rank.most, rank.at_rest, uses)
