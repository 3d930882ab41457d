"""Check, in 16 bits, that norms compute as precisely as on one device before they round their output.

An output in 16 bits may be off by more than a mean square that was computed in 16 bits changes it. So an RMS
norm is compared with its definition in float64, of the input that it was given, and any norm with the
reference's where both are given the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plait.ranks.collectives import all_reduce
from plait.tensor.parallel.embedding_and_norm import ParallelRMSNorm
from plait.verification.reference.tensor_sketches import nearest_of

FEATURES = 0.25
"""Share of a norm's features, at most, whose sums over rows may differ for equal inputs: kernels for other
numbers of rows round few elements otherwise."""
NEARLY_HALF = 2.0**-20
"""What may be added to half a rounding step, relative to an element: errors of a computation in float32."""
SENTENCE = (
    "it is given equal numbers, and is off by more than the rounding of its output: something in it is "
    "computed in 16 bits"
)

RMSNorm = nn.RMSNorm | ParallelRMSNorm
Found = tuple[str, Tensor, Tensor]
"""A sentence, the actual and the expected tensor."""


def rounded_otherwise(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], norms: set[str]
) -> Found | None:
    """Return the first of `norms` whose input sketches are bitwise equal and whose output sketches differ."""
    for name, given in found.items():
        path, side, *call = name.split("|")
        output = "|".join([path, "gives", *call])
        is_known = output in found and {name, output} <= expected.keys()
        if side != "given" or path not in norms or not is_known:
            continue
        if not torch.equal(given, nearest_of(expected[name], given)):
            continue
        nearest = nearest_of(expected[output], found[output])
        if float((found[output] != nearest).double().mean()) > FEATURES:
            return f"inside, of the norm {path}: {SENTENCE}", found[output], nearest
    return None


class RMSNorms:
    """Compares the RMS norms of a layer, also those that `tp` partitions, with their definition."""

    def __init__(self, layer: nn.Module) -> None:
        self._runs: list[tuple[str, RMSNorm, Tensor, Tensor]] = []
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(partial(self._note, path))
            for path, module in layer.named_modules()
            if is_defined(module)
        ]

    def begin(self) -> None:
        """Discard the recorded runs of the norms."""
        self._runs.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def differences(self) -> Iterator[Found]:
        """Yield the norms that differ. Communication: for each run of a partitioned norm one all-reduce."""
        for path, norm, x, output in self._runs:
            defined = _rms_norm(x, norm)
            least = torch.finfo(x.dtype).smallest_normal  # below it the spacing of numbers is constant
            spacing = torch.finfo(x.dtype).eps * 2.0 ** defined.abs().clamp(min=least).log2().floor()
            if bool(((output.double() - defined).abs() > spacing / 2 + NEARLY_HALF * defined.abs()).any()):
                yield f"inside, of the norm {path}: {SENTENCE}", output, defined.to(output.dtype)

    def _note(self, path: str, module: RMSNorm, given: tuple[Any, ...], output: Tensor) -> None:
        x = given[0].detach()
        if x.dtype.itemsize <= 2 and output.dtype == x.dtype and output.shape == x.shape:
            self._runs.append((path, module, x, output.detach()))


def is_defined(module: nn.Module) -> bool:
    """Return whether a module is an RMS norm of torch over the last dim, or plait's that `tp` partitions."""
    is_plain = type(module) is nn.RMSNorm and len(module.normalized_shape) == 1
    return is_plain or isinstance(module, ParallelRMSNorm)


def _rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """Return the RMS norm of the last dim, or this rank's shard of that of all features, in float64."""
    wide = x.double()
    squares, features = wide.square().sum(-1, keepdim=True), x.shape[-1]
    epsilon = norm.epsilon if isinstance(norm, ParallelRMSNorm) else norm.eps
    if isinstance(norm, ParallelRMSNorm):
        squares = all_reduce(squares, norm.group, checked=False).wait()
        features *= norm.group.size
    normalized = (
        wide / (squares / features + (torch.finfo(torch.float32).eps if epsilon is None else epsilon)).sqrt()
    )
    return normalized if norm.weight is None else norm.weight.detach().double() * normalized
