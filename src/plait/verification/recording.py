"""What the reference computed, and by how much each of it may be missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from plait.verification.exact import require_whole
from plait.verification.place import OF_PARAMETERS, Key, Moment

MARGIN = 16.0
"""Times the deviation that a few shaken runs showed: a woven run may be unlucky where they were not."""
LEAST = 16.0
"""Machine epsilons of a tensor's size that are allowed in any case."""
NARROW = 4.0
"""In the place of both for 16-bit numbers, of which little would be left to compare."""
FLOOR = 1e-3
"""What is smaller than this times the largest of its kind is measured against that: some gradients (the key
bias of attention) are exactly zero, and consist of noise."""


OF_ROOT = 1e-12
"""Relative: what a norm may be missed by where all else is exact."""


class Bound(NamedTuple):
    """How large a tensor is (its largest element, or `FLOOR`), and by how much it may be missed."""

    size: float
    allowed: float


NOTHING = Bound(0.0, 0.0)


@dataclass
class Recording:
    """Of each moment the tensors by key, and the largest difference that rounding explains."""

    epsilon: float = 0.0
    """Machine epsilon of the run, for what is added up in a wider dtype."""
    values: dict[Moment, dict[Key, Tensor]] = field(default_factory=dict)
    bounds: dict[Moment, dict[Key, Bound]] = field(default_factory=dict)

    def add(self, moment: Moment, values: Mapping[Key, Tensor]) -> None:
        """Record a moment; nothing in it may be missed by anything yet."""
        largest: dict[str, float] = {}
        peaks = {key: peak(value) for key, value in values.items()}
        for key, size in peaks.items():
            largest[key.kind] = max(largest.get(key.kind, 0.0), size)
        self.values[moment] = dict(values)
        self.bounds[moment] = {
            key: Bound(max(size, FLOOR * largest[key.kind]), 0.0) for key, size in peaks.items()
        }

    def widen(self, moment: Moment, values: Mapping[Key, Tensor]) -> None:
        """The same moment of a shaken run: allow as much as that shows, and no less than a few roundings."""
        recorded, bounds = self.values[moment], self.bounds[moment]
        for key, value in values.items():
            if value.is_floating_point():
                (size, allowed), epsilon = bounds[key], max(self.epsilon, torch.finfo(value.dtype).eps)
                margin, least = (NARROW, NARROW) if epsilon > 1e-4 else (MARGIN, LEAST)
                shown = margin * difference(value, recorded[key])
                bounds[key] = Bound(size, max(allowed, shown, least * epsilon * size))

    def require_exact(self) -> None:
        """ModelError where a tensor is not of whole numbers; only the norm, a root, may then be missed."""
        for moment, values in self.values.items():
            for key, value in values.items():
                if key.kind == "norm":
                    size = self.bounds[moment][key].size
                    self.bounds[moment][key] = Bound(size, OF_ROOT * size)
                elif key.kind not in ("clip", "evaluation"):
                    of = f" of layer {key.layer}" if key.layer >= 0 else ""
                    named = f" ({key.name})" if key.kind in OF_PARAMETERS else ""
                    require_whole(value, f"the reference's {key.kind}{of}{named}")

    def microbatches(self, step: int) -> int:
        """How many micro-batches of the global batch a step has."""
        return sum(moment.step == step and moment.microbatch >= 0 for moment in self.values)


def peak(tensor: Tensor) -> float:
    """The largest absolute element; 0 of an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference of two tensors; infinity where one is NaN and the other is not."""
    if not actual.numel():
        return 0.0
    if torch.equal(actual, expected):
        return 0.0
    wide = (actual.detach().double() - expected.double()).abs()
    wide = wide.masked_fill((actual == expected) | (actual.isnan() & expected.isnan()), 0.0)
    return float(wide.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
