"""What runs in each rank where a run moves to another layout, and how many bytes that should send."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import plait
from parity.checkpoints import LAYOUTS, Make, Run, adamw, model, plan_of
from plait.engine.blueprint import Blueprint, build_blueprint
from plait.plan.axes import coordinate_of, sizes_of_plan
from plait.plan.layout.layout import Layout
from plait.plan.layout.shards import shard_boxes
from plait.plan.plan import Plan

TIMEOUT = 20.0


def mesh_of(plan: Plan) -> plait.Mesh:
    """On the first ranks of the world."""
    return plait.Mesh(plan, timeout=TIMEOUT, ranks=range(plan.world))


def begun(plan: Plan, make: Make = adamw, build: Callable[[], nn.Module] = model) -> Run | None:
    """A new run; None on a rank that is not in its mesh."""
    mesh = mesh_of(plan)
    if not mesh.has_this_rank:
        return None
    engine = plait.parallelize(build(), plan, mesh, loss=plait.cross_entropy, seed=3)
    return Run(engine, make(engine.parameter_groups(weight_decay=0.1)))


def moved(
    run: Run | None, plan: Plan, make: Make = adamw, build: Callable[[], nn.Module] = model
) -> tuple[Run | None, int]:
    """The run under another plan, None where this rank has left it; and the bytes that this rank has sent."""
    mesh = mesh_of(plan)
    if run is None:
        engine, optimizer = plait.reshard(build(), make, plan, mesh, loss=plait.cross_entropy)
    else:
        engine, optimizer = plait.reshard(run.engine, run.optimizer, plan, mesh)
    counts = mesh.traffic.snapshot().get(mesh.all_ranks.name, {})
    sent = counts["all_to_all"].bytes if "all_to_all" in counts else 0
    return None if engine is None else Run(engine, optimizer), sent


def local_tensors(run: Run) -> dict[str, Tensor]:
    """Copies of this rank's parameters, gradients and optimizer state."""
    found = {}
    for name, parameter in run.engine.named_parameters():
        found[name] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
        for key, value in run.optimizer.state[parameter].items():
            found[f"{key} of {name}"] = value.clone()
    return found


@cache
def blueprint_of(name: str) -> Blueprint:
    return build_blueprint(model(), plan_of(name))


def mask(layout: Layout, where: dict[str, int] | None) -> Tensor:
    """Which elements of a global tensor the rank at a coordinate holds; none without one."""
    held = torch.zeros(layout.shape, dtype=torch.bool)
    for part in () if where is None else shard_boxes(layout, where):
        held[part.box.slices] = True
    return held


def holds(name: str, parameter: str, rank: int) -> Tensor | None:
    """Which elements of a parameter a rank has in a layout; None where it has not got the parameter."""
    plan, blueprint = plan_of(name), blueprint_of(name)
    if rank >= plan.world:
        return None
    where = coordinate_of(rank, sizes_of_plan(plan))
    if where["pp"] not in blueprint.owners[parameter]:
        return None
    return mask(blueprint.layouts[parameter], where)


def bytes_that_differ(before: str, after: str) -> int:
    """What ranks need in one layout and lack in the other: parameters, two moments, and step counts."""
    total = 0
    for parameter in blueprint_of(after).layouts:
        for rank in range(LAYOUTS[after].world):
            needed, held = holds(after, parameter, rank), holds(before, parameter, rank)
            if needed is not None:
                total += 3 * 8 * int((needed if held is None else needed & ~held).sum())
                total += 4 * (held is None)
    return total


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of tensors that differ in any bit, or that one of them lacks."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]


def trips(before: str, afters: list[str]) -> list[tuple[Any, ...]]:
    """There and back for each of `afters`: bytes sent both ways, and which tensors differ then."""
    run = begun(plan_of(before))
    if run is not None:
        run.train(range(1))
    found = []
    for after in afters:
        start = {} if run is None else local_tensors(run)
        run, there = moved(run, plan_of(after))
        run, back = moved(run, plan_of(before))
        found.append((there, back, same(start, {} if run is None else local_tensors(run))))
    return found
