"""Sketches of tensors within a layer, which locate the first module whose input or output differs.

Layers are compared by their outputs. Where an output differs, sketches show whether a norm, a linear, or the
computation between two modules is the cause. A sketch is a weighted sum over all rows, `[features]`, of the
input or output of a module: small to store, and different where the tensor is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plait.verification.reference.recording import Tolerance, largest_difference

Side = Literal["given", "gives"]
GOLDEN = 0.6180339887498949
LISTED = 4
"""Equal modules that a sentence lists."""


class ModuleSketches:
    """Records a sketch (weighted sum) of the first input and the output of each module within a layer.

    `found` has those of the latest run, in the order of execution, by `path|side|call|rows`. Tensors that are
    not floating-point, have fewer than two dims or are nested in other values have none.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        self.norms = {path for path, module in layer.named_modules() if "Norm" in type(module).__name__}
        """The paths of the norms."""
        self._calls: Counter[tuple[str, Side]] = Counter()
        self._handles: list[RemovableHandle] = []
        for path, module in layer.named_modules():
            if path:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, path)))
                self._handles.append(module.register_forward_hook(partial(self._after, path)))

    def begin(self) -> None:
        """Discard the recorded sketches (weighted sums), before the next forward of the layer."""
        self.found = {}
        self._calls.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._note(path, "given", given[0] if given else None)

    def _after(self, path: str, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        self._note(path, "gives", output)

    def _note(self, path: str, side: Side, value: Any) -> None:
        call = self._calls[path, side]
        self._calls[path, side] += 1
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.numel():
            rows = value.numel() // value.shape[-1]
            self.found[f"{path}|{side}|{call}|{rows}"] = sketch_of(value)


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
    """Which module input or output within a layer first differs from the reference's on a rank, if any."""

    order: int
    """Number of the reference's sketches before it. Of several ranks the earliest is the cause, since outputs
    are summed over ranks."""
    sentence: str


def first_inner_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance]
) -> InnerDifference | None:
    """Return which module input or output differs first, or that none does; None if none was compared.

    None where no module was compared: a layer without modules, or whose modules have other shapes.
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


def _sentence(name: str, equal: list[str], *, all_compared: bool) -> str:
    path, side, *call = name.split("|")
    first = "is the first to differ" if all_compared else "is the first to differ of what could be compared"
    if side == "gives":
        known = ", and what it is given is equal" if "|".join([path, "given", *call]) in equal else ""
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
    """Return `expected`, or if `found` has another size, the elements nearest to those of `found`."""
    if found.shape == expected.shape:
        return expected
    ordered = expected.sort().values
    after = torch.searchsorted(ordered, found).clamp(max=len(ordered) - 1)
    one, other = ordered[(after - 1).clamp(min=0)], ordered[after]
    return torch.where((one - found).abs() < (other - found).abs(), one, other)
