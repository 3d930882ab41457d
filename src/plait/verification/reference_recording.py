"""What the reference computed, and by how much each of it may be missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.verification.integer_mode import GRAIN, require_integers
from plait.verification.location import OF_PARAMETERS, RecordKey, RecordScope

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


EXACT = ("clip", "scale", "evaluation")
"""Kinds that are not looked at for whole numbers: settings, and what is not compared then."""
HALVED = ("clipped", "value", "state")
"""Kinds with up to three binary digits more than gradients have, of their factor; see `exact_bound`."""
RESULTS = ("total", "mean", "final", "norm")
"""Kinds that say nothing any more where they are NaN."""
OF_LOSS = ("total", "mean", "whole", "evaluation")


class Tolerance(NamedTuple):
    """How large a tensor is (its largest element, or `FLOOR`), and by how much it may be missed."""

    size: float
    allowed: float


NO_TOLERANCE = Tolerance(0.0, 0.0)


@dataclass
class ReferenceRecording:
    """Of each moment the tensors by key, and the largest difference that rounding explains."""

    values: dict[RecordScope, dict[RecordKey, Tensor]] = field(default_factory=dict)
    tolerances: dict[RecordScope, dict[RecordKey, Tolerance]] = field(default_factory=dict)

    def add(self, scope: RecordScope, values: Mapping[RecordKey, Tensor]) -> None:
        """Record a moment; nothing in it may be missed by anything yet. ModelError where the loss is NaN."""
        self.values[scope] = dict(values)
        largest: dict[object, float] = {}
        peaks = {key: peak(value) for key, value in values.items()}
        for key, size in peaks.items():
            largest[_family(key)] = max(largest.get(_family(key), 0.0), size)
        self.tolerances[scope] = {
            key: Tolerance(max(size, FLOOR * largest[_family(key)]), 0.0) for key, size in peaks.items()
        }
        for key, value in values.items():
            if key.kind in RESULTS and bool(value.isnan().any()):
                raise ModelError(
                    f"the reference's {key.kind} is NaN{self._since()}: there is nothing to compare."
                )

    def widen(
        self,
        scope: RecordScope,
        values: Mapping[RecordKey, Tensor],
        epsilon_of: Callable[[RecordKey], float] = lambda key: 0.0,
    ) -> None:
        """The same moment of a shaken run: allow as much as that shows, and no less than a few roundings.

        `epsilon_of` gives the machine epsilon of what a tensor was made of, where that is a narrower dtype.
        """
        recorded, tolerances = self.values[scope], self.tolerances[scope]
        for key, value in values.items():
            if value.is_floating_point() or value.is_complex():
                size, allowed = tolerances[key]
                epsilon = max(torch.finfo(value.dtype).eps, epsilon_of(key))
                margin, least = (NARROW, NARROW) if epsilon > 1e-4 else (MARGIN, LEAST)
                shown = margin * difference(value, recorded[key])
                shown = shown if math.isfinite(shown) else 0.0  # a run that broke explains nothing
                tolerances[key] = Tolerance(size, max(allowed, shown, least * epsilon * size))

    def require_exact(self) -> None:
        """ModelError where a tensor is not of whole numbers; only the norm, a root, may then be missed."""
        for scope, values in self.values.items():
            for key, value in values.items():
                if key.kind == "norm":
                    size = self.tolerances[scope][key].size
                    self.tolerances[scope][key] = Tolerance(size, OF_ROOT * size)
                elif key.kind not in EXACT:
                    of = f" of layer {key.layer}" if key.layer >= 0 else ""
                    named = f" ({key.name})" if key.kind in OF_PARAMETERS else ""
                    grain = GRAIN / 8 if key.kind in HALVED else GRAIN
                    require_integers(value, f"the reference's {key.kind}{of}{named}", grain)

    def microbatches(self, step: int) -> int:
        """How many micro-batches of the global batch a step has."""
        return sum(scope.step == step and scope.microbatch >= 0 for scope in self.values)

    def _since(self) -> str:
        """Where the first NaN is, for a sentence."""
        for scope, values in self.values.items():
            for key, value in values.items():
                if key.kind == "output" and bool(value.isnan().any()):
                    where = f"what layer {key.layer} gives" if key.layer >= 0 else "the batch"
                    return f", first in {where} (step {scope.step + 1}, micro-batch {scope.microbatch})"
        return ", though no layer gives one (is the loss's weight zero?)"


def _family(key: RecordKey) -> object:
    """Tensors whose sizes have to do with each other: the noise of one is measured by the largest."""
    if key.kind == "state":
        return key.kind, key.name.rpartition("/")[2]
    if key.kind in ("output", "inside"):
        return key.kind, key.layer, key.name
    return (key.kind, key.name) if key.kind == "gradient" else key.kind


def peak(tensor: Tensor) -> float:
    """The largest absolute element that is finite; 0 of an empty tensor."""
    if not tensor.numel():
        return 0.0
    sizes = _wide(tensor).abs()
    return float(sizes.where(sizes.isfinite(), 0.0).max())


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference of two tensors; infinity where only one is NaN, or infinite."""
    if not actual.numel() or torch.equal(actual, expected):
        return 0.0
    return float(apart(actual, expected).max())


def apart(actual: Tensor, expected: Tensor) -> Tensor:
    """The absolute difference of each element, float64; of a complex number of both parts."""
    one, other = _wide(actual), _wide(expected)
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _wide(tensor: Tensor) -> Tensor:
    """Any numbers as float64; a complex one as two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double()
