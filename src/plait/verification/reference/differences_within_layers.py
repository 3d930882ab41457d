"""Finds by hooks which module inside a layer differs first, and how precisely norms compute.

Layers are compared by their outputs. Where an output differs, sketches show whether a norm, a linear, or the
computation between two modules is the cause. A sketch is a weighted sum over all rows, `[features]`, of the
input or output of a module: small to store, and different where the tensor is.

In 16 bits an output may be off by more than a mean square that was computed in 16 bits changes it. So an RMS
norm is compared with its definition in float64, of the input that it was given, and any norm with the
reference's where both are given the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plait.ranks.collectives import all_reduce
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.parallel.embedding_and_norm import ParallelRMSNorm
from plait.verification.reference.recording import Tolerance, largest_difference

Side = Literal["given", "gives"]
GOLDEN = 0.6180339887498949
LISTED = 4
"""Equal modules that a sentence lists."""
FEATURES = 0.25
"""Share of a norm's features, at most, whose sums over rows may differ for equal inputs: kernels for other
numbers of rows round few elements otherwise."""
NEARLY_HALF = 2.0**-20
"""What may be added to half a rounding step, relative to an element: errors of a computation in float32."""
COARSE = (
    "it is given equal numbers, and is off by more than the rounding of its output: something in it is "
    "computed in 16 bits"
)

RMSNorm = nn.RMSNorm | ParallelRMSNorm
ComparedModules = tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tolerance]]
"""Sketches of what the modules of a layer were given and gave, the expected ones, and their tolerances."""
Found = tuple[str, Tensor, Tensor]
"""A sentence, the actual and the expected tensor."""


class ModuleSketches:
    """Records a sketch (weighted sum) of the first input and the output of each module within a layer.

    `found` has those of the latest run, in the order of execution, by `path|side|call|rows`. Of a tuple, such
    as a router's logits, weights and indices, each tensor has one. Other tensors that are not floating-point,
    have fewer than two dims or are nested in other values have none, nor do those whose elements share
    memory: linears in float8 gather such inputs of regions. Runs that trace a layer for its graphs have no
    values, and are not recorded.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        self.norms = {path for path, module in layer.named_modules() if "Norm" in type(module).__name__}
        """The paths of the norms."""
        self._calls: Counter[tuple[str, Side]] = Counter()
        self._handles: list[RemovableHandle] = []
        for path, module in layer.named_modules():
            if path:
                note = partial(self._note, path)
                self._handles += module.register_forward_pre_hook(note), module.register_forward_hook(note)

    def begin(self) -> None:
        """Discard the recorded sketches (weighted sums), before the next forward of the layer."""
        self.found = {}
        self._calls.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _note(self, path: str, module: nn.Module, given: tuple[Any, ...], *gives: Any) -> None:
        """Record sketches of a module's input before it runs, and of its output afterwards."""
        if TRACE.get() is not None:
            return
        side: Side = "gives" if gives else "given"
        value = next(iter(gives or given), None)
        call = self._calls[path, side]
        self._calls[path, side] += 1
        several = isinstance(value, tuple)
        for number, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            if _is_sketched(tensor, among_several=several):
                rows, which = tensor.numel() // tensor.shape[-1], f".{number}" if number else ""
                self.found[f"{path}|{side}|{call}{which}|{rows}"] = sketch_of(tensor)


def _is_sketched(value: object, *, among_several: bool) -> bool:
    """Return whether a value has a sketch; whole numbers have one beside other tensors only."""
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.numel() or overlaps(value):
        return False
    return value.is_floating_point() or (among_several and value.dtype == torch.int64)


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements share memory, as after `expand`, so that writing is not possible."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def sketch_of(tensor: Tensor) -> Tensor:
    """Return a weighted sum over all dims but the last of `tensor`, float64."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).double()
    return unequal_weights(len(rows), rows.device) @ rows


def unequal_weights(count: int, device: torch.device) -> Tensor:
    """Return `count` weights between 0.5 and 1.5, float64."""
    numbers = torch.arange(1, count + 1, dtype=torch.float64, device=device)
    return (numbers * GOLDEN) % 1 + 0.5


@dataclass(frozen=True)
class InnerDifference:
    """The first input or output of a module inside a layer that differs from the reference, on one rank."""

    order: int
    """Number of the reference's sketches before it. Of several ranks the earliest is the cause, since outputs
    are summed over ranks."""
    sentence: str


def first_inner_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance]
) -> InnerDifference | None:
    """Return the first difference inside a layer: at a module, or after all of them; None if unknown.

    After all of them if no sketch differs; unknown if besides no module's output could be compared.
    """
    equal: list[str] = []
    for order, name in enumerate(expected):
        if name not in found:
            continue
        if not _is_equal(found[name], expected[name], tolerances[name].allowed):
            return InnerDifference(order, _sentence(name, equal, all_compared=order == len(equal)))
        equal.append(name)
    if not _given(equal):
        return None
    text = f"inside, what {_listed(equal)} is equal, so it is what the layer computes with that"
    return InnerDifference(len(expected), text)


def input_is_equal(
    path: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
) -> bool:
    """Return whether the module at `path` got the expected input, as far as that is compared."""
    names = [name for name in expected.keys() & found.keys() if name.startswith(f"{path}|given|")]
    return all(_is_equal(found[name], expected[name], tolerances[name].allowed) for name in names)


def _sentence(name: str, equal: list[str], *, all_compared: bool) -> str:
    path, side, *call = name.split("|")
    first = "is the first to differ" if all_compared else "is the first to differ of what could be compared"
    if side == "gives":
        given = "|".join([path, "given", call[0].split(".")[0], *call[1:]])
        known = ", and what it is given is equal" if given in equal else ""
        return f"inside, what {path} gives {first}{known}"
    known = f": what {_listed(equal)} is equal, so it is what is computed between" if _given(equal) else ""
    return f"inside, what {path} is given {first}{known}"


def _given(equal: list[str]) -> list[str]:
    """Return the paths of the modules whose output sketches are equal, each once."""
    return list(dict.fromkeys(name.split("|")[0] for name in equal if "|gives|" in name))


def _listed(equal: list[str]) -> str:
    """Return the last of the equal modules as the start of a sentence: `query, key and value give`."""
    *most, last = _given(equal)[-LISTED:]
    return f"{', '.join(most)} and {last} give" if most else f"{last} gives"


def _is_equal(found: Tensor, expected: Tensor, allowed: float) -> bool:
    """Return whether sketches are equal; if `found` is shorter, whether `expected` contains its elements."""
    if len(found) > len(expected):
        return False
    return largest_difference(found, nearest_of(expected, found)) <= allowed


def nearest_of(expected: Tensor, found: Tensor) -> Tensor:
    """Return `expected`; or if sizes differ, for each element of `found` the nearest one in `expected`."""
    if found.shape == expected.shape:
        return expected
    ordered = expected.sort().values
    after = torch.searchsorted(ordered, found).clamp(max=len(ordered) - 1)
    one, other = ordered[(after - 1).clamp(min=0)], ordered[after]
    return torch.where((one - found).abs() < (other - found).abs(), one, other)


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
            return f"inside, of the norm {path}: {COARSE}", found[output], nearest
    return None


class RMSNorms:
    """Compares each RMS norm of a layer with the definition, to find out if it computes in less precision."""

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
                yield f"inside, of the norm {path}: {COARSE}", output, defined.to(output.dtype)

    def _note(self, path: str, module: RMSNorm, given: tuple[Any, ...], output: Tensor) -> None:
        x = given[0].detach()
        if TRACE.get() is not None:  # of a layer that is traced for its graphs tensors have no values
            return
        if x.dtype.itemsize <= 2 and output.dtype == x.dtype and output.shape == x.shape:
            self._runs.append((path, module, x, output.detach()))


def is_defined(module: nn.Module) -> bool:
    """Return whether a module is an RMS norm whose definition is known: torch's, or plait's over `tp`."""
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
