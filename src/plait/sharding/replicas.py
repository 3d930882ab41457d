"""Is what several ranks must hold alike still alike? Parameters and optimizer state, compared by their bits.

    over `dp`    every parameter, or every piece of one
    over `tp`    parameters that are whole, and copies of the same piece
    over `pp`    parameters that are tied across stages

Each rank hashes what it holds on its own device. A parameter and its state make one number, and these are
gathered along each axis: what is equal along the axes one by one is equal everywhere. Only where something
differs do the ranks tell each other more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.comm.buffers import describe
from plait.comm.collectives import all_gather, all_reduce
from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.comm.tensor_hash import as_hex, tensor_hash
from plait.errors import ReplicaError
from plait.layout import Layout
from plait.schedules.step_programs import StepPrograms
from plait.sharding.difference import describe_difference
from plait.sharding.owners import Owners
from plait.sharding.unit import Unit


@dataclass(frozen=True)
class LocalReplicas:
    """What this rank holds of a model, and who else holds it."""

    parameters: Mapping[str, nn.Parameter]
    """This rank's, by name."""
    layouts: Mapping[str, Layout]
    """Of every parameter of the model, in order."""
    tied: Owners
    """For each parameter that is tied across ranks of `pp`, these."""
    mesh: Mesh

    def same_along(self, group: Group) -> Tensor:
        """bool `[ranks, parameters]`: where a rank of the group must hold what this one holds, itself too."""
        here, theirs = self.mesh.coordinate, [self.mesh.coordinate_of(rank) for rank in group.ranks]
        nobody, known, columns = [False] * group.size, dict[object, list[bool]](), []
        for name, layout in self.layouts.items():
            stages = self.tied.get(name, (here["pp"],))
            key = (layout.placements, stages)
            if name in self.parameters and key not in known:
                owner = layout.owner(here)
                known[key] = [at["pp"] in stages and layout.owner(at) == owner for at in theirs]
            columns.append(known[key] if name in self.parameters else nobody)
        return torch.tensor(columns, dtype=torch.bool).view(-1, group.size).T


class Fingerprint(NamedTuple):
    """Of one tensor that belongs to a parameter."""

    what: str
    """`value`, or `optimizer state` and its name there."""
    kind: str
    """Dtype and shape."""
    hash: Tensor
    """int64, 0-d, on the tensor's device."""

    def __str__(self) -> str:
        return f"{self.kind} of bits {as_hex(self.hash)}"


def local_replicas(
    units: Iterable[Unit], layouts: Mapping[str, Layout], steps: StepPrograms, mesh: Mesh
) -> LocalReplicas:
    """What this rank holds: the pieces of its `units`. `steps` say which are tied across stages."""
    mine = {name: piece for unit in units for name, piece in unit.pieces.items()}
    owners = {
        unit: tuple(sorted({steps.schedule.rank_of[place.stage] for place in places}))
        for unit, places in steps.spec.units.items()
    }
    # A parameter that several layers share is a unit by itself, of the same name.
    tied = {name: owners[name] for name in layouts if len(owners.get(name, ())) > 1}
    return LocalReplicas(mine, layouts, tied, mesh)


@torch.no_grad()
def check_replicas(held: LocalReplicas, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise `ReplicaError`, on every rank of the world, where something that must be alike is not.

    It names the first parameter of the model that differs. Every rank calls it, with its optimizer or none.
    Communication: 8 bytes a parameter of the model over each of `dp`, `tp` and, where some are tied across
    stages, `pp`; 2 bytes a parameter over `world`. The device is waited for once all is hashed.
    """
    mesh = held.mesh
    prints = {name: _fingerprints(parameter, optimizer) for name, parameter in held.parameters.items()}
    numbers = _numbers(prints, list(held.layouts), mesh.device)
    groups = [mesh.group(axis) for axis in ("dp", "tp", *(["pp"] if held.tied else []))]
    under_way = [all_gather(numbers, group, checked=False) for group in groups]
    shared, differ = torch.zeros(2, len(held.layouts), dtype=torch.bool)
    for group, gathered in zip(groups, under_way, strict=True):
        everyone, same = gathered.wait().cpu().view(group.size, -1), held.same_along(group)
        shared |= same.sum(0) > 1
        differ |= ((everyone != everyone[group.index]) & same).any(0)
    found = torch.stack([shared, differ]).to(mesh.device, torch.uint8)
    all_shared, all_differ = all_reduce(found, mesh.group("world"), "max", checked=False).wait().tolist()
    if any(all_differ):
        name = list(held.layouts)[all_differ.index(1)]
        mine = {one.what: str(one) for one in prints.get(name, ())}
        raise ReplicaError(
            f"{describe_difference(name, held.layouts[name], mine, mesh)}; {sum(all_differ)} of the "
            f"{sum(all_shared)} parameters that ranks must hold alike differ: go back to a checkpoint, and "
            "look for what only some ranks did, such as a write besides the optimizer's, or a faulty device."
        )


def _fingerprints(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> list[Fingerprint]:
    """Of a parameter, then of what an optimizer keeps for it, by name."""
    tensors = {"value": parameter.detach()}
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for key in sorted(state, key=str):
        if isinstance(state[key], Tensor):
            tensors[f"optimizer state {key}"] = state[key]
    return [Fingerprint(what, describe(one), tensor_hash(one)) for what, one in tensors.items()]


def _numbers(prints: Mapping[str, list[Fingerprint]], names: list[str], device: torch.device) -> Tensor:
    """int64 `[parameters]`: one number for all fingerprints of a parameter; 0 for those of other ranks."""
    numbers = torch.zeros(len(names), dtype=torch.int64, device=device)
    rows = [(place, one) for place, name in enumerate(names) for one in prints.get(name, ())]
    if not rows:
        return numbers
    hashes = torch.stack([one.hash.to(device, non_blocking=True) for _, one in rows])
    known = [(place, *_salt(f"{one.what} {one.kind}")) for place, one in rows]
    places, salts, factors = torch.tensor(known).T.contiguous().to(device, non_blocking=True)
    # Sums of whole numbers are the same in any order.
    return numbers.index_add_(0, places, (hashes ^ salts) * factors)


def _salt(text: str) -> tuple[int, int]:
    """Two numbers of 64 bits that stand for a text; the second is odd."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    return first, second | 1
