"""`state_dict` and the like: whole tensors gathered from the shards of all ranks, or divided between them.

A tensor is gathered first between the ranks of a stage, over each of `shard`, `cp` and `tp` where it is cut;
then it is broadcast over `pp`, from the first rank that owns it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.engine.fingerprint import lines_of_values
from plait.engine.runner import Runtime
from plait.engine.tensor_sources import (
    LocalSource,
    RankZeroSource,
    TensorLocation,
    TensorSource,
    locate_tensors,
)
from plait.errors import ModelError, PlaitError
from plait.plan.axes import STAGE_AXES
from plait.plan.layout.shards import shard
from plait.plan.rules import join
from plait.ranks.collectives import broadcast
from plait.ranks.consistency_check import require_same_text
from plait.ranks.text_collectives import all_gather_text, first_nonempty_text
from plait.tensor.autograd.redistribution import full_tensor
from plait.tensor.parallel.tensor_parallelism import named


def state_dict(runtime: Runtime, *, everywhere: bool) -> dict[str, Tensor]:
    """Return the whole model's parameters and buffers on the CPU, gathered from all ranks."""
    mesh = runtime.mesh
    require_same_text(f"state_dict(everywhere={everywhere})", mesh.group("world"), mesh.device)
    held: dict[str, Tensor] = {**dict(runtime.named_parameters()), **dict(runtime.named_buffers())}
    keeps = everywhere or mesh.rank == 0
    found = {
        name: tensor.to("cpu", copy=True)
        for name, tensor in _full(runtime, held, "a state dict", everywhere=everywhere)
        if tensor is not None and keeps
    }
    first = {alias: name for name, place in _places(runtime).items() for alias in place.saved_as}
    layers = runtime.meta_layers.layers
    names = [join(layer.path, name) for layer in layers for name in layer.module.state_dict()]
    return {name: found[first[name]] for name in names if first.get(name) in found}


def named_gradients(runtime: Runtime) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole gradient of each parameter, gathered to every rank."""
    held = {name: one.grad for name, one in runtime.named_parameters() if one.grad is not None}
    for name, gradient in _full(runtime, held, "gradients", everywhere=True):
        assert gradient is not None
        yield name, gradient


@torch.no_grad()
def load_state_dict(runtime: Runtime, given: Mapping[str, Any] | None, *, from_rank_zero: bool) -> None:
    """Copy this rank's shards of whole tensors into its parameters and buffers."""
    places = _places(runtime)
    source = _agreed(runtime, LocalSource(places, 0, given or {}), from_rank_zero=from_rank_zero)
    parameters, buffers = dict(runtime.named_parameters()), dict(runtime.named_buffers())
    for name, place in places.items():
        here = [buffers[alias] for alias in place.saved_as if alias in buffers]
        if name in parameters:
            parameters[name].copy_(
                shard(source.read(name), runtime.blueprint.layouts[name], runtime.mesh.coordinate)
            )
        elif here:
            whole = source.read(name)
            for buffer in here:
                buffer.copy_(whole)
        else:
            source.skip(name)


def _agreed(runtime: Runtime, values: LocalSource, *, from_rank_zero: bool) -> TensorSource:
    """Check that the values given on all ranks fit the model and agree; return the source to read them from.

    ModelError on every rank where one has values that do not fit; CommunicationError where they differ.
    """
    mesh, world = runtime.mesh, runtime.mesh.group("world")
    require_same_text(f"load_state_dict(broadcast={from_rank_zero})", world, mesh.device)
    error_text, lines = "", ""
    if mesh.rank == 0 or not from_rank_zero:
        try:
            lines = lines_of_values(values.known())
        except PlaitError as error:  # the other ranks wait for a text
            error_text = str(error)
    if first_error := first_nonempty_text(error_text, world, mesh.device):
        raise ModelError(first_error)
    if from_rank_zero:
        return RankZeroSource(values, world, mesh.device)
    doing, remedy = "load a state dict", "give the same values on each, or broadcast=True"
    require_same_text(lines, world, mesh.device, doing=doing, remedy=remedy)
    return values


def _full(
    runtime: Runtime, held: Mapping[str, Tensor], what: str, *, everywhere: bool
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and full tensor of each parameter or buffer in any rank's `held`, in the model's order.

    With `everywhere` on every rank, else on the ranks of rank 0's pipeline, and None on the others.
    `held`: this rank's shards.
    """
    mesh = runtime.mesh
    mine = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held.items()}
    text = json.dumps(mine)
    for axis in STAGE_AXES:  # all ranks of a stage have the same names
        require_same_text(f"{what} of {text}", mesh.group(axis), mesh.device)
    group = mesh.group("pp")
    dtypes = [json.loads(one) for one in all_gather_text(text, group, mesh.device)]
    receives = everywhere or all(mesh.index(axis) == 0 for axis in STAGE_AXES)
    for name, place in _places(runtime).items():
        owners = [rank for rank, names in enumerate(dtypes) if name in names]
        if not owners:
            continue
        whole = None
        if name in held:
            whole = held[name].detach().to(mesh.device)
            whole = whole if place.is_buffer else full_tensor(whole, runtime.blueprint.layouts[name], mesh)
        if receives and (everywhere or owners[0] != 0):
            if whole is None:
                dtype = getattr(torch, dtypes[owners[0]][name])
                whole = torch.empty(place.tensor.shape, dtype=dtype, device=mesh.device)
            whole = broadcast(whole, group, owners[0], checked=False).about(f"all of {name}").wait()
        yield name, whole if receives else None


def _places(runtime: Runtime) -> dict[str, TensorLocation]:
    """Return by name the location in the model, and the full shape, of each parameter and saved buffer."""
    found = {}
    for name, place in locate_tensors(named(runtime.meta_layers.layers)).items():
        if place.saved_as:
            shape = place.tensor.shape if place.is_buffer else runtime.blueprint.layouts[name].shape
            empty = torch.empty(shape, dtype=place.tensor.dtype, device="meta")
            found[name] = replace(place, tensor=empty)
    return found
