"""What a rank holds of a run, as pieces of named global tensors; and who writes what several hold alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer import state_of
from plait.comm.mesh import Mesh
from plait.layout import Layout
from plait.plan import Plan


class Woven(Protocol):
    """What checkpoints ask of an engine."""

    plan: Plan
    mesh: Mesh
    run_state: Mapping[str, Any]

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Of the pieces of every parameter of the model."""
        ...

    @property
    def buffer_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the buffers of the whole model that are saved."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """For each further name of a parameter of the model, that which it has here."""
        ...

    @property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """For each parameter that several ranks of `pp` hold, these."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers that are saved, each whole."""
        ...


@dataclass(frozen=True)
class Held:
    """A piece of a global tensor."""

    name: str
    layout: Layout
    piece: Tensor
    ranks: tuple[int, ...]
    """All that hold the same piece."""


def parameter(name: str) -> str:
    """The name of a parameter or a buffer in a checkpoint."""
    return f"model.{name}"


def optimizer_state(name: str, key: str = "") -> str:
    """The name of what an optimizer keeps for a parameter under `key`."""
    return f"optim.state.{name}.{key}"


def contents(engine: Woven, optimizer: torch.optim.Optimizer | None) -> Iterator[Held]:
    """What this rank holds, in an order that is the same on all ranks that hold a piece."""
    mesh, tied = engine.mesh, engine.tied
    for name, piece in engine.named_parameters():
        layout = engine.layouts[name]
        stages = tied.get(name, (mesh.index("pp"),))
        yield _held(parameter(name), layout, piece.detach(), stages, mesh)
        if optimizer is not None:
            for key, (shape, tensor) in state_of(optimizer, name, piece, layout).items():
                whole = layout if shape is None else _whole(shape, layout)
                yield _held(optimizer_state(name, key), whole, tensor.detach(), stages, mesh)
    for name, buffer in engine.named_buffers():
        layout = Layout(tuple(buffer.shape), {axis: mesh.size(axis) for axis in ("replicate", "shard", "tp")})
        yield _held(parameter(name), layout, buffer.detach().contiguous(), (mesh.index("pp"),), mesh)


def mine(held: Iterable[Held], rank: int) -> Iterator[Held]:
    """Those that `rank` is to write: each piece by one of the ranks that hold it, bytes shared out evenly.

    Every rank decides it by itself: all that hold a piece have met the same ones before it.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    for one in held:
        load = loads.setdefault(one.ranks, [0] * len(one.ranks))
        least = load.index(min(load))
        load[least] += one.piece.nbytes
        if one.ranks[least] == rank:
            yield one


def _held(name: str, layout: Layout, piece: Tensor, stages: Iterable[int], mesh: Mesh) -> Held:
    alike = (dict(zip(layout.axes, where, strict=True)) for where in layout.replicas(mesh.coordinate))
    places = list(alike)
    ranks = tuple(sorted(mesh.rank_at(pp=stage, **place) for stage in stages for place in places))
    return Held(name, layout, piece, ranks)


def _whole(shape: tuple[int, ...], like: Layout) -> Layout:
    return Layout(shape, dict(zip(like.axes, like.degrees, strict=True)))
