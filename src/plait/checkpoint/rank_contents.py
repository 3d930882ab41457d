"""What a rank holds of a run, as pieces of named global tensors; and who writes what several hold alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer_state import state_of
from plait.comm.coordinates import rank_at
from plait.comm.mesh import Mesh
from plait.layout import Layout
from plait.plan import Plan


class Checkpointable(Protocol):
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

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """PlanError where an update would depend on parameters that another rank has."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers that are saved, each whole."""
        ...


@dataclass(frozen=True)
class RankPiece:
    """A piece of a global tensor."""

    name: str
    layout: Layout
    piece: Tensor
    ranks: tuple[int, ...]
    """All that hold the same piece."""


def parameter_key(name: str) -> str:
    """The name of a parameter or a buffer in a checkpoint."""
    return f"model.{name}"


def state_key(name: str, key: str = "") -> str:
    """The name of what an optimizer keeps for a parameter under `key`."""
    return f"optim.state.{name}.{key}"


def state_keys(tensors: Iterable[str]) -> dict[str, list[str]]:
    """For each parameter that has a state among these names, the keys of its tensors."""
    prefix = "optim.state."
    found: dict[str, list[str]] = {}
    for full in tensors:
        if full.startswith(prefix):
            name, _, key = full.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(key)
    return found


def rank_contents(engine: Checkpointable, optimizer: torch.optim.Optimizer | None) -> Iterator[RankPiece]:
    """What this rank holds, in an order that is the same on all ranks that hold a piece."""
    mesh, tied = engine.mesh, engine.tied
    for name, piece in engine.named_parameters():
        layout = engine.layouts[name]
        stages = tied.get(name, (mesh.index("pp"),))
        yield _held(parameter_key(name), layout, piece.detach(), stages, mesh)
        if optimizer is not None:
            for key, (shape, tensor) in state_of(optimizer, name, piece, layout).items():
                of = layout if shape is None else replicated_layout(layout, shape)
                yield _held(state_key(name, key), of, tensor.detach(), stages, mesh)
    for name, buffer in engine.named_buffers():
        layout = Layout(tuple(buffer.shape), {axis: mesh.size(axis) for axis in ("replicate", "shard", "tp")})
        yield _held(parameter_key(name), layout, buffer.detach().contiguous(), (mesh.index("pp"),), mesh)


class WriterAssignment:
    """Who writes what: each piece one of the ranks that hold it, bytes shared out evenly.

    Every rank decides it by itself: all that hold a piece have met the same ones before it.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[int]] = {}

    def assign(self, ranks: tuple[int, ...], size: int) -> int:
        """The rank that writes the next piece, of `size` bytes, which `ranks` hold."""
        load = self._loads.setdefault(ranks, [0] * len(ranks))
        least = load.index(min(load))
        load[least] += size
        return ranks[least]


def written_by(held: Iterable[RankPiece], rank: int) -> Iterator[RankPiece]:
    """Those that `rank` is to write."""
    writers = WriterAssignment()
    return (one for one in held if writers.assign(one.ranks, one.piece.nbytes) == rank)


def replica_ranks(
    layout: Layout, where: Mapping[str, int], stages: Iterable[int], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The ranks that hold the same piece as the one at `where`, in `stages` (ranks of `pp`)."""
    alike = [dict(zip(layout.axes, there, strict=True)) for there in layout.replicas(where)]
    return tuple(sorted(rank_at({"pp": stage, **place}, sizes) for stage in stages for place in alike))


def replicated_layout(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Of what every rank of the same axes has all of."""
    return Layout(shape, dict(zip(layout.axes, layout.degrees, strict=True)))


def _held(name: str, layout: Layout, piece: Tensor, stages: Iterable[int], mesh: Mesh) -> RankPiece:
    return RankPiece(name, layout, piece, replica_ranks(layout, mesh.coordinate, stages, mesh.sizes))
