"""Matrices of a flat buffer in float8: a scale for each, from all ranks' parts, and the cast of this rank's.

largest values of this rank's parts    [matrices]    of the shard, as the optimizer left it
maximum over the ranks with parts                    one all-reduce a step for all units of the same ranks
factors, scales                        [matrices]    in fp32
parts of `whole`                                     in float8, by the factors; then gathered
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.plan.flat_buffer_specs import Slot
from plait.ranks.accelerator import moved_later, sent
from plait.ranks.collectives import all_reduce
from plait.ranks.group import Group
from plait.tensor.float8.cast import cast_by, factor_of, largest_magnitude
from plait.tensor.float8.recipes import CastFormat


@dataclass(eq=False)
class ScaledMatrices:
    """The matrices of one flat buffer that layers have in float8: their scales, and the cast of a shard."""

    form: CastFormat
    compute: torch.dtype
    """The dtype in which layers would have them otherwise: that value is cast."""
    groups: tuple[Group, ...]
    """The ranks that have other parts of them, along one axis after the other."""
    slots: Mapping[str, Slot]
    """Where this rank's part of each lies in its flat shard."""
    factors: Tensor
    """What values are multiplied by before they are cast, fp32 `[matrices]`, on the layers' device."""
    scales: Tensor
    """What values in float8 are multiplied by, fp32 `[matrices]`."""
    largest: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The largest absolute value of this rank's part of each, fp32 `[matrices]`."""

    def scale_of(self, name: str) -> Tensor:
        """Return the scale of one matrix, fp32 `[]`: a view that later steps write to."""
        return self.scales[list(self.slots).index(name)]

    @torch.no_grad()
    def find_largest(self, shard: Tensor) -> None:
        """Set `largest`: of each matrix the largest absolute value in this rank's flat `shard`."""
        parts = (slot.view_of(shard) for slot in self.slots.values())
        # Rounded, the largest value is the largest of the rounded values.
        found = torch.stack([largest_magnitude(part) for part in parts]).to(self.compute).float()
        self.largest = sent(found, self.scales.device)

    def set_scales(self, largest: Tensor) -> None:
        """Set factors and scales from the matrices' `largest` absolute values, fp32 `[matrices]`."""
        self.factors.copy_(factor_of(largest, self.form))
        self.scales.copy_(self.factors.reciprocal())

    def cast(self, shard: Tensor, own: Tensor) -> None:
        """Cast this rank's flat `shard` to float8, each matrix with its scale, and write it to `own`."""
        for slot, factor in zip(self.slots.values(), self.factors.unbind(), strict=True):
            part = moved_later(slot.view_of(shard), own.device).to(self.compute)
            slot.view_of(own).copy_(cast_by(part, factor, self.form).data)


@torch.no_grad()
def scale_together(matrices: Sequence[ScaledMatrices]) -> None:
    """Set the scales of the matrices of several buffers, by an all-reduce of the largest absolute values.

    Communication: for buffers with the same `groups` one all-reduce over each, of 4 bytes a matrix.
    """
    together: dict[tuple[Group, ...], list[ScaledMatrices]] = {}
    for one in matrices:
        together.setdefault(one.groups, []).append(one)
    for groups, alike in together.items():
        largest = torch.cat([one.largest for one in alike])
        for group in groups:
            started = all_reduce(largest, group, "max", checked=False)
            largest = started.about("the largest values of matrices").wait()
        parts = torch.split(largest, [len(one.slots) for one in alike])
        for one, part in zip(alike, parts, strict=True):
            one.set_scales(part)
