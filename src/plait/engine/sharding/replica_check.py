"""Check of replicas: compares the bits of parameters, gradients and optimizer state held by several ranks.

    over `dp_cp`    every parameter, or every shard of one
    over `tp`       parameters that are whole, and copies of the same shard
    over `pp`       parameters that are tied across stages

Each rank hashes its tensors on their device. A parameter and its state make one number, and these are
gathered along each axis: what is equal along the axes one by one is equal everywhere. Only where a parameter
differs do the ranks exchange the hashes of its tensors, for the error message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer_set import whole_states
from plait.engine.sharding.unit import Owners
from plait.errors import ReplicaError
from plait.plan.axes import PLAN_AXES, STAGE_AXES, index_along
from plait.plan.layout.layout import Layout
from plait.plan.shard_plan import replica_ranks
from plait.ranks.accelerator import moved_later
from plait.ranks.collectives import all_gather, all_reduce
from plait.ranks.consistency_check import as_hex, tensor_hash
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import all_gather_text
from plait.ranks.transport.call_description import describe

_PLAIN = (bool, int, float, complex, str, type(None))
"""Types of optimizer state and options that are compared, beside tensors."""
_MOST_RANKS = 8
"""The ranks that are listed for each version of a tensor."""


class Fingerprint(NamedTuple):
    """The hash of one tensor of a parameter or its optimizer state, or the text of an option."""

    what: str
    """`value`, `gradient`, `optimizer state` and its key, or `option` of the optimizer and its name."""
    kind: str
    """Dtype and shape; of what is no tensor, its text."""
    hash: Tensor | None
    """int64, 0-d, on the tensor's device; None for what is no tensor."""

    def __str__(self) -> str:
        return self.kind if self.hash is None else f"{self.kind} of bits {as_hex(self.hash)}"


@torch.no_grad()
def check_replicas(
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    owners: Owners,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise `ReplicaError` on every rank if replicas of a parameter or its optimizer state differ.

    `parameters` are this rank's shards, `layouts` and `owners` those of the whole model. The error names the
    first parameter of the model that differs. Every rank calls it, with its optimizer or none.
    Communication: 8 bytes a parameter of the model over each of `dp_cp`, `tp` and, where some are tied across
    stages, `pp`; 2 bytes a parameter over `world`. It blocks until the device has computed all hashes.
    """
    options = _options(optimizer)
    prints = {
        name: [*_fingerprints(parameter, optimizer), *options.get(id(parameter), ())]
        for name, parameter in parameters.items()
    }
    numbers = _numbers(prints, list(layouts), mesh.device)
    tied = any(len(stages) > 1 for stages in owners.values())
    groups = [mesh.group(axis) for axis in (*STAGE_AXES, *(["pp"] if tied else []))]
    pending = [all_gather(numbers, group, checked=False) for group in groups]
    shared, differ = torch.zeros(2, len(layouts), dtype=torch.bool)
    for group, gathered in zip(groups, pending, strict=True):
        everyone = gathered.wait().cpu().view(group.size, -1)
        same = _replicas_along(group, parameters, layouts, owners, mesh)
        shared |= same.sum(0) > 1
        differ |= ((everyone != everyone[group.index]) & same).any(0)
    found = torch.stack([shared, differ]).to(mesh.device, torch.uint8)
    all_shared, all_differ = all_reduce(found, mesh.group("world"), "max", checked=False).wait().tolist()
    if any(all_differ):
        name = list(layouts)[all_differ.index(1)]
        mine = {one.what: str(one) for one in prints.get(name, ())}
        raise ReplicaError(
            f"{_describe_difference(name, layouts[name], mine, mesh)}; {sum(all_differ)} of the "
            f"{sum(all_shared)} parameters that ranks must hold alike differ: go back to a checkpoint, and "
            "look for what only some ranks did, such as a write besides the optimizer's, or a faulty device."
        )


def _replicas_along(
    group: Group, held: Collection[str], layouts: Mapping[str, Layout], owners: Owners, mesh: Mesh
) -> Tensor:
    """Return bool `[ranks, parameters]`: whether a rank of the group holds the same shard as this rank."""
    nowhere, known, columns = [False] * group.size, dict[object, list[bool]](), []
    for name, layout in layouts.items():
        key = (layout.placements, owners[name])
        if name in held and key not in known:
            ranks = replica_ranks(layout, mesh.coordinate, owners[name], mesh.sizes)
            known[key] = [rank in ranks for rank in group.ranks]
        columns.append(known[key] if name in held else nowhere)
    return torch.tensor(columns, dtype=torch.bool).view(-1, group.size).T


def _fingerprints(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> list[Fingerprint]:
    """Return the fingerprints of a parameter, its gradient and its optimizer state, sorted by key."""
    held: dict[str, object] = {"value": parameter.detach()}
    if parameter.grad is not None:
        held["gradient"] = parameter.grad
    alike = optimizer is not None and whole_states(optimizer) is None
    state = optimizer.state.get(parameter, {}) if optimizer is not None and alike else {}
    held |= {f"optimizer state {key}": state[key] for key in sorted(state, key=str)}
    return [_fingerprint(what, one) for what, one in held.items() if isinstance(one, (Tensor, *_PLAIN))]


def _options(optimizer: torch.optim.Optimizer | None) -> dict[int, list[Fingerprint]]:
    """Return fingerprints of the optimizer and its options for each parameter, by the parameter's `id`."""
    found: dict[int, list[Fingerprint]] = {}
    for group in () if optimizer is None else optimizer.param_groups:
        prints = [Fingerprint("optimizer", type(optimizer).__qualname__, None)]
        compared = (key for key in sorted(group) if isinstance(group[key], (Tensor, *_PLAIN, tuple)))
        prints += (_fingerprint(f"option {key}", group[key]) for key in compared)
        found |= {id(parameter): prints for parameter in group["params"]}
    return found


def _fingerprint(what: str, value: object) -> Fingerprint:
    if isinstance(value, Tensor):
        return Fingerprint(what, describe(value), tensor_hash(value))
    return Fingerprint(what, repr(value), None)


def _numbers(prints: Mapping[str, list[Fingerprint]], names: list[str], device: torch.device) -> Tensor:
    """Return int64 `[parameters]`: one combined hash per parameter; 0 where this rank does not hold it."""
    numbers = torch.zeros(len(names), dtype=torch.int64, device=device)
    rows = [(index, one) for index, name in enumerate(names) for one in prints.get(name, ())]
    if not rows:
        return numbers
    none = torch.zeros((), dtype=torch.int64, device=device)
    hashes = torch.stack([none if one.hash is None else moved_later(one.hash, device) for _, one in rows])
    salts_of = {text: salt_of(text) for text in {f"{one.what} {one.kind}" for _, one in rows}}
    known = [(index, *salts_of[f"{one.what} {one.kind}"]) for index, one in rows]
    indices, salts, factors = moved_later(torch.tensor(known).T.contiguous(), device)
    # Sums of whole numbers are the same in any order.
    return numbers.index_add_(0, indices, (hashes ^ salts) * factors)


def salt_of(text: str) -> tuple[int, int]:
    """Return two 64-bit numbers, the second odd, by which a hash is made to depend on `text`."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    return first, second | 1


def _describe_difference(name: str, layout: Layout, mine: Mapping[str, str], mesh: Mesh) -> str:
    """Return a text that names a parameter's first tensor that differs, and the ranks with each hash.

    The text is the same on every rank. `mine` maps this rank's tensors of the parameter to their hashes; it
    is empty where there are none.
    Communication: 8 bytes, and a line of text, gathered over `world`.
    """
    texts = all_gather_text(json.dumps(mine), mesh.group("world"), mesh.device)
    for what, versions in _differences([json.loads(text) for text in texts], layout, mesh):
        held = " but ".join(f"{version} on {_listed(ranks, mesh)}" for version, ranks in versions.items())
        return f"the {what} of {name} is {held}"
    return f"{name} changed while it was compared"


def _differences(
    of_ranks: Sequence[Mapping[str, str]], layout: Layout, mesh: Mesh
) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yield each tensor whose hash differs between ranks with the same shard, and the ranks of each hash."""
    shards: dict[tuple[int, ...], list[int]] = {}
    for rank, hashes in enumerate(of_ranks):
        if hashes:
            shards.setdefault(layout.owner(mesh.coordinate_of(rank)), []).append(rank)
    for ranks in shards.values():
        for what in dict.fromkeys(what for rank in ranks for what in of_ranks[rank]):
            versions: dict[str, list[int]] = {}
            for rank in ranks:
                versions.setdefault(of_ranks[rank].get(what, "missing"), []).append(rank)
            if len(versions) > 1:
                yield what, versions


def _listed(ranks: Sequence[int], mesh: Mesh) -> str:
    """Return ranks as text: `ranks 0 (dp 0, tp 0), 2 (dp 1, tp 0) and 9 more`."""
    axes = [axis for axis in PLAN_AXES if mesh.size(axis) > 1]
    listed = []
    for rank in ranks[:_MOST_RANKS]:
        coordinate = mesh.coordinate_of(rank)
        indices = ", ".join(f"{axis} {index_along(axis, coordinate, mesh.sizes)}" for axis in axes)
        listed.append(f"{rank} ({indices})")
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}{more}"
