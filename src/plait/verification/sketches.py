"""What happens inside of a layer, in sketches: which module there is the first whose numbers differ.

A layer is compared by what it gives. Where that differs, sketches say whether it was a norm, a linear, or
what is computed between two modules. A sketch is a weighted sum over all rows, `[features]`, of what a module
is given or gives: little to keep, and enough to tell whether anything differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plait.verification.reference_recording import Tolerance, difference

Side = Literal["given", "gives"]
GOLDEN = 0.6180339887498949
LISTED = 4
"""Modules that are equal and are listed."""


class Sketches:
    """Sketches what the modules inside of one layer are given and give, each time that it runs.

    `found` has those of the latest run, in the order in which modules ran, by `path|side|call|rows`. It knows
    nothing of tensors that are not floating-point, of fewer than two dims, or inside of other values.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        self._calls: Counter[tuple[str, Side]] = Counter()
        self._handles: list[RemovableHandle] = []
        for path, module in layer.named_modules():
            if path:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, path)))
                self._handles.append(module.register_forward_hook(partial(self._after, path)))

    def begin(self) -> None:
        """Forget the latest run."""
        self.found = {}
        self._calls.clear()

    def close(self) -> None:
        """Look no more."""
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
    weights = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=rows.device)
    return ((weights * GOLDEN) % 1 + 0.5) @ rows


@contextmanager
def sketched(layer: nn.Module, *, wanted: bool) -> Iterator[dict[str, Tensor]]:
    """Give the sketches of one run of `layer`, which are there when it is done; none unless wanted."""
    found: dict[str, Tensor] = {}
    if not wanted:
        yield found
        return
    sketches = Sketches(layer)
    try:
        yield found
        found.update(sketches.found)
    finally:
        sketches.close()


@dataclass(frozen=True)
class InnerDifference:
    """Where inside of a layer numbers begin to differ, as one rank sees it."""

    order: int
    """How much of what the reference sketched comes before it. Of several ranks the earliest is right: what
    one of them gives is summed over all."""
    sentence: str


def first_inner_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance]
) -> InnerDifference | None:
    """Return which module of a layer is the first that is given or gives something else.

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
    """Return the modules whose outputs are among these, each once."""
    return list(dict.fromkeys(name.split("|")[0] for name in equal if "|gives|" in name))


def _listed(equal: list[str]) -> str:
    """Return the last of the modules that are equal: `query, key and value give`."""
    *most, last = _given(equal)[-LISTED:]
    return f"{', '.join(most)} and {last} give" if most else f"{last} gives"


def _is_equal(found: Tensor, expected: Tensor, allowed: float) -> bool:
    """Whether a sketch is as it should be; one of some of the features: whether they are among those."""
    if found.shape == expected.shape:
        return difference(found, expected) <= allowed
    if len(found) > len(expected):
        return False
    ordered = expected.sort().values
    after = torch.searchsorted(ordered, found).clamp(max=len(ordered) - 1)
    nearest = torch.minimum((ordered[after] - found).abs(), (ordered[(after - 1).clamp(min=0)] - found).abs())
    return bool((nearest <= allowed).all())
