"""Scales by which one rank's experts cast the rows of tokens, also of other ranks' tokens, to float8.

A rank does not know which tokens its rows are. All scales are powers of two: so those of all ranks that hold
the same experts are counted by their exponents, and compared with the counts of the recorded ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.engine.runner import Runtime
from plait.plan.axes import EXPERT_DATA_AXES, TOKEN_AXES
from plait.plan.layout.layout import divide
from plait.ranks.group import Group
from plait.verification.candidate.weight_gradient_checker import sum_over
from plait.verification.findings import box_of

ZEROS, OTHERS, FIRST = 0, 1, 200
"""Where the counts of scales of zero rows, of those that are no power of two, and of 2⁰ are."""


def counts_of(scales: Tensor) -> Tensor:
    """Return how many scales are zero, no power of two, and each power of two: float64 counts.

    `scales`: as `noted` returns them.
    """
    fraction, exponent = torch.frexp(scales.flatten().float())
    places = torch.where(fraction == 0.5, exponent.long() - 1 + FIRST, OTHERS)
    return torch.bincount(places.where(scales.flatten() != 0, ZEROS), minlength=2 * FIRST).double().cpu()


class ExpertScales:
    """Counts the float8 scales of one rank's experts, actual and expected."""

    def __init__(self, runtime: Runtime) -> None:
        """All ranks call it, in one order: it may make communication groups."""
        self.plan, self.mesh = runtime.blueprint.plan, runtime.mesh
        self.layouts = runtime.blueprint.whole_layouts
        divides, has_experts = self.plan.divides_experts, runtime.blueprint.float8.experts
        axes = EXPERT_DATA_AXES if divides else TOKEN_AXES
        self.group: Group | None = self.mesh.group(axes) if has_experts else None
        """The ranks with the same experts, that have all tokens of a micro-batch, or of those of `dp`."""

    def total(self, *scales: Tensor) -> list[Tensor]:
        """Return the counts of scales, summed over the ranks with the same experts, by one all-reduce."""
        assert self.group is not None
        return list(sum_over(self.group, torch.stack([counts_of(one) for one in scales])))

    def microbatches(self, microbatch: int) -> list[int]:
        """Return the indices of the micro-batches whose tokens reach experts together with `microbatch`."""
        if not self.plan.divides_experts:
            return [microbatch]
        each = self.plan.microbatches
        return [rank * each + microbatch % each for rank in range(self.plan.dp)]

    def counts(self, tables: list[Tensor]) -> Tensor:
        """Return the counts of the recorded scales of this rank's experts, summed over `tables` `[T, E]`.

        T tokens, E experts; -1 where a token does not go to the expert.
        """
        own = [table[:, slice(part.start, part.stop)] for table in tables for part in (self._own(table),)]
        return counts_of(torch.cat([one[one >= 0] for one in own]))

    def of_weight(self, path: str, recorded: Tensor, *, is_transposed: bool) -> Tensor:
        """Return this rank's part of the recorded scales of a weight, `[E, out]` or `[E, 1]`, flat."""
        layout = self.layouts[path]
        if recorded.shape[1] == 1:
            own = self._own(recorded.T)
            return recorded[own.start : own.stop].flatten()
        dim = 1 if is_transposed else 2
        whole = recorded.unsqueeze(dim).expand(layout.shape)
        return box_of(layout, self.mesh.coordinate).of(whole).select(dim, 0).flatten()

    def _own(self, table: Tensor) -> range:
        """Return the numbers of this rank's experts; `table`: with a column for each."""
        index = self.mesh.index("ep") if self.plan.divides_experts else 0
        return divide(table.shape[1], self.plan.ep)[index]
