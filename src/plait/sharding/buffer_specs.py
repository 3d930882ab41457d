"""Which parameters of a unit lie in one flat buffer, and where: decided from shapes alone, for a whole model.

Every rank decides it for all units, so that it knows which piece of which parameter any other rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from plait.layout import Flat, Layout
from plait.sharding.offsets import Offsets, place
from plait.sharding.storage_policy import StoragePolicy


@dataclass(frozen=True)
class BufferKind:
    """What the parameters of one buffer have in common."""

    dtype: torch.dtype
    """What layers compute with."""
    master: torch.dtype
    """What the optimizer updates."""
    gradient: torch.dtype
    """What gradients are added up in."""
    reduce: torch.dtype
    """What gradients travel in."""
    trains: bool
    cut: bool
    """Whether the optimizer updates a piece of it, or an offloaded copy."""
    summands: int
    """How many neighbours along `tp` hold the same, and each a summand of its gradient."""


Arrangement = Mapping[str, Mapping[BufferKind, Offsets]]
"""The buffers of each unit."""


def arrange(
    units: Mapping[str, Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    summed: Mapping[str, int],
    policy: StoragePolicy,
    ranks: int,
) -> Arrangement:
    """The buffers of `units` (names of parameters), cut between `ranks`; `layouts` are those over `tp`.

    `summed` says of each parameter how many neighbours along `tp` have a summand of its gradient each. Places
    are those of the first rank along `tp`, which has the largest pieces; so they are the same for all.
    """
    return {
        unit: {
            kind: place({name: _largest(layouts[name]) for name in members}, ranks if kind.cut else 1)
            for kind, members in _kinds(names, parameters, summed, policy).items()
        }
        for unit, names in units.items()
    }


def piece_layouts(arrangement: Arrangement, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The layouts of what the optimizer updates, from those over `tp`."""
    pieces = dict(layouts)
    for kinds in arrangement.values():
        for kind, slots in kinds.items():
            if kind.cut:
                for slot in slots.places:
                    pieces[slot.name] = _cut(layouts[slot.name], Flat(slots.bounds(slot)))
    return pieces


def _kinds(
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    summed: Mapping[str, int],
    policy: StoragePolicy,
) -> dict[BufferKind, list[str]]:
    kinds: dict[BufferKind, list[str]] = {}
    for name in names:
        parameter = parameters[name]
        kind = BufferKind(
            dtype=policy.dtype_of(parameter),
            master=policy.master_of(parameter),
            gradient=policy.gradient_of(parameter),
            reduce=policy.reduce_of(parameter),
            trains=parameter.requires_grad,
            # What is frozen is cut only where parameters are: there is nothing else of it.
            cut=policy.cuts and (parameter.requires_grad or not policy.keeps_parameters),
            summands=summed[name],
        )
        kinds.setdefault(kind, []).append(name)
    return kinds


def _largest(layout: Layout) -> torch.Size:
    return torch.Size(layout.local_shape([0] * len(layout.axes)))


def _cut(layout: Layout, flat: Flat) -> Layout:
    axes = dict(zip(layout.axes, layout.degrees, strict=True))
    return Layout(
        layout.shape, axes, dict(zip(layout.axes, layout.placements, strict=True)) | {"shard": flat}
    )
