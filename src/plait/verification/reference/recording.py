"""The tensors that the reference run computed, each with a tolerance, and their distribution to the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.ranks import json_serialization
from plait.ranks.collectives import broadcast
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import broadcast_text
from plait.verification.reference.integer_mode import GRAIN, require_integers
from plait.verification.step_location import PARAMETER_KINDS, SCALE, WHOLE_STEP, RecordKey, RecordScope

MARGIN = 16.0
"""Tolerance in units of a perturbed run's deviation, since a few runs do not show the largest error."""
UPDATE_KINDS = ("value", "state")
MARGIN_OF_UPDATES = 64.0
"""Replaces `MARGIN` for parameters and optimizer state after an update. An adaptive optimizer divides by the
size of each gradient's elements, so that those which nearly cancel decide the largest deviation: the ratio of
two runs' is a ratio of errors of few elements, of which one in some hundreds exceeds 16."""
LEAST_EPSILONS = 16.0
"""Tolerance in machine epsilons of a tensor's size, at least."""
MARGIN_16_BIT = 4.0
"""Replaces both for 16-bit numbers, of which a larger tolerance would leave little to compare."""
SIZE_FLOOR = 1e-3
"""Tensors smaller than this times the largest of their kind are given that size: some gradients (of the key
bias of attention) are exactly zero, and consist of rounding errors."""
NORM_TOLERANCE = 1e-12
"""Relative tolerance of a norm in mode exact, where it is the only tensor that is not a whole number."""

NOT_INTEGER = ("clip", "scale", "evaluation", "margin", SCALE)
"""Kinds that need not be integers in mode exact: settings, kinds that are not compared, powers of two."""
FINER_GRAIN = ("clipped", "value", "state")
"""Kinds with up to three binary digits more than gradients have, from the clip factor; see `exact_bound`."""
NAN_CHECKED = ("total", "mean", "final", "norm")
"""Kinds of which a NaN makes the recording useless."""
LOSS_KINDS = ("total", "mean", "whole", "evaluation")


class Tolerance(NamedTuple):
    """The largest magnitude of a recorded tensor, and the largest difference from it that is allowed."""

    size: float
    allowed: float


NO_TOLERANCE = Tolerance(0.0, 0.0)


@dataclass
class ReferenceRecording:
    """The recorded tensors of each step and micro-batch, with tolerances for rounding."""

    values: dict[RecordScope, dict[RecordKey, Tensor]] = field(default_factory=dict)
    tolerances: dict[RecordScope, dict[RecordKey, Tolerance]] = field(default_factory=dict)
    narrowing: bool = False
    """Whether layers cast to a narrower dtype than the run's: then every tensor is compared by itself.

    As in 16 bits, both runs continue with the recorded value of each tensor, here also of those between
    layers. Else the errors of these layers would widen the tolerances of all others.
    """

    def add(self, scope: RecordScope, values: Mapping[RecordKey, Tensor]) -> None:
        """Record the tensors of a step or micro-batch. Raises ModelError if a loss or gradient is NaN."""
        self.values[scope] = dict(values)
        largest: dict[object, float] = {}
        peaks = {key: largest_magnitude(value) for key, value in values.items()}
        for key, size in peaks.items():
            largest[_family(key)] = max(largest.get(_family(key), 0.0), size)
        self.tolerances[scope] = {
            key: Tolerance(max(size, SIZE_FLOOR * largest[_family(key)]), 0.0) for key, size in peaks.items()
        }
        for key, value in values.items():
            if key.kind in NAN_CHECKED and bool(value.isnan().any()):
                raise ModelError(
                    f"the reference's {key.kind} is NaN{self._since()}: there is nothing to compare."
                )

    def widen(
        self,
        scope: RecordScope,
        values: Mapping[RecordKey, Tensor],
        epsilon_of: Callable[[RecordKey], float] = lambda key: 0.0,
    ) -> None:
        """Increase tolerances to cover the deviations of a perturbed run, and at least a few epsilons.

        `epsilon_of` returns the machine epsilon of a narrower dtype that a tensor was computed from, else 0.
        """
        recorded, tolerances = self.values[scope], self.tolerances[scope]
        for key, value in values.items():
            if value.is_floating_point() or value.is_complex():
                size, allowed = tolerances[key]
                epsilon = max(torch.finfo(value.dtype).eps, epsilon_of(key))
                usual = MARGIN_OF_UPDATES if key.kind in UPDATE_KINDS else MARGIN
                margin, least = (MARGIN_16_BIT,) * 2 if epsilon > 1e-4 else (usual, LEAST_EPSILONS)
                shown = margin * largest_difference(value, recorded[key])
                shown = shown if math.isfinite(shown) else 0.0  # a perturbed run that overflowed
                tolerances[key] = Tolerance(size, max(allowed, shown, least * epsilon * size))

    def require_exact(self) -> None:
        """Raise ModelError unless all tensors are integers; the norm, a square root, gets a tolerance."""
        for scope, values in self.values.items():
            for key, value in values.items():
                if key.kind == "norm":
                    size = self.tolerances[scope][key].size
                    self.tolerances[scope][key] = Tolerance(size, NORM_TOLERANCE * size)
                elif key.kind not in NOT_INTEGER:
                    of = f" of layer {key.layer}" if key.layer >= 0 else ""
                    named = f" ({key.name})" if key.kind in PARAMETER_KINDS else ""
                    grain = GRAIN / 8 if key.kind in FINER_GRAIN else GRAIN
                    require_integers(value, f"the reference's {key.kind}{of}{named}", grain)

    def find(self, scope: RecordScope, key: RecordKey) -> Tensor | None:
        """Return a recorded tensor, or None if it is not recorded."""
        return self.values.get(scope, {}).get(key)

    def number(self, step: int, kind: str) -> float:
        """Return a recorded scalar of a whole step: gradient norm, loss scale, mean loss, …."""
        return float(self.values[RecordScope(step)][RecordKey(kind)])

    def microbatches(self, step: int) -> int:
        """Return the number of micro-batches of the global batch in a step."""
        trained = [scope for scope in self.values if scope.step == step and not scope.evaluated]
        return sum(scope.microbatch != WHOLE_STEP for scope in trained)

    def _since(self) -> str:
        """Return the location of the first NaN, as the continuation of a sentence."""
        for scope, values in self.values.items():
            for key, value in values.items():
                if key.kind == "output" and bool(value.isnan().any()):
                    where = f"the output of layer {key.layer}" if key.layer >= 0 else "the batch"
                    return f", first in {where} (step {scope.step + 1}, micro-batch {scope.microbatch})"
        return ", though no output of a layer is (is the loss's weight zero?)"


def _family(key: RecordKey) -> object:
    """Return a key that is equal for tensors with one common floor of magnitude: see `SIZE_FLOOR`."""
    if key.kind == "state":
        return key.kind, key.name.rpartition("/")[2]
    if key.kind in ("output", "inside", SCALE):
        return key.kind, key.layer, key.name
    return (key.kind, key.name) if key.kind == "gradient" else key.kind


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest finite magnitude of an element; 0 for an empty tensor."""
    if not tensor.numel():
        return 0.0
    sizes = _wide(tensor).abs()
    return float(sizes.where(sizes.isfinite(), 0.0).max())


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinity where only one is NaN or infinite."""
    if not actual.numel() or torch.equal(actual, expected):
        return 0.0
    return float(elementwise_difference(actual, expected).max())


def elementwise_difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the absolute difference per element, float64; complex numbers as two parts in a last dim."""
    one, other = _wide(actual), _wide(expected)
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _wide(tensor: Tensor) -> Tensor:
    """Return `tensor` as float64; complex numbers as two parts in a last dim."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double()


Object = TypeVar("Object")
Wanted = Callable[[RecordScope, RecordKey], bool]
TableEntry = tuple[RecordKey, tuple[int, ...], torch.dtype, Tolerance]


def distribute_recording(
    recording: ReferenceRecording | None, mesh: Mesh, wanted: Wanted
) -> ReferenceRecording:
    """Return the part of rank 0's `recording` for which `wanted` is true; on rank 0 all of it.

    Communication: broadcasts over the world, for each scope: its table, then its tensors, packed by dtype.
    """
    if mesh.group("world").size == 1:
        assert recording is not None
        return recording
    head = None if recording is None else (list(recording.values), recording.narrowing)
    scopes, narrowing = broadcast_object(head, mesh)
    received = ReferenceRecording(narrowing=narrowing)
    for scope in scopes:
        _broadcast_scope(scope, recording, received, mesh, wanted)
    return recording or received


def _broadcast_scope(
    scope: RecordScope,
    recording: ReferenceRecording | None,
    received: ReferenceRecording,
    mesh: Mesh,
    wanted: Wanted,
) -> None:
    table: list[TableEntry] | None = None
    if recording is not None:
        values, tolerances = recording.values[scope], recording.tolerances[scope]
        table = [(key, tuple(t.shape), t.dtype, tolerances[key]) for key, t in values.items()]
    entries = broadcast_object(table, mesh)
    kept: dict[RecordKey, Tensor] = {}
    for dtype in dict.fromkeys(entry[2] for entry in entries):
        packed = [entry for entry in entries if entry[2] == dtype]
        sizes = [torch.Size(shape).numel() for _, shape, _, _ in packed]
        flat = torch.empty(sum(sizes), dtype=dtype, device=mesh.device)
        parts = torch.split(flat, sizes)
        if recording is not None:
            for (key, *_), part in zip(packed, parts, strict=True):
                part.copy_(recording.values[scope][key].reshape(-1))
        broadcast(flat, mesh.group("world"), checked=False).wait()
        for (key, shape, _, _), part in zip(packed, parts, strict=True):
            if recording is None and wanted(scope, key):
                kept[key] = part.clone().view(shape)
    received.values[scope] = kept
    received.tolerances[scope] = {key: tolerance for key, _, _, tolerance in entries if key in kept}


def broadcast_object(thing: Object | None, mesh: Mesh) -> Object:
    """Return rank 0's object, of a type that JSON text can represent, on all ranks.

    Communication: two broadcasts over the world.
    """
    world = mesh.group("world")
    text = json_serialization.encode(thing) if world.index == 0 else ""
    received: Object = json_serialization.decode(
        broadcast_text(text, world, world.device_for_text(mesh.device))
    )
    return received
