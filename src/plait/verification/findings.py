"""Comparing one tensor with its reference, and collecting what differs on a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from plait.layout import Layout
from plait.verification.location import Location, StepPhase
from plait.verification.reference_recording import Tolerance, elementwise_difference, largest_difference
from plait.verification.sketches import InnerDifference

REMEMBERED = 64
"""Differences of one rank that are listed; of others only their number is kept."""
SHOWN = 1 << 20
"""Elements of a tensor that travel with the first difference, for causes that several ranks show together."""

TELLING = 32
"""Elements that a narrower dtype would not hold, of which enough say that it was on the way."""
VAGUE = 0.5
"""Where rounding explains more than this part of a tensor, that it is equal says little."""


@dataclass(frozen=True)
class Origin:
    """Where a rank's tensor begins in the global one."""

    offsets: tuple[int, ...] = ()
    """Per dim; none: at 0."""
    flat: tuple[tuple[int, ...], int] | None = None
    """For an interval of a box's elements: the sizes of the box that begins at `offsets`, and the first."""
    joined: tuple[int, int, int] | None = None
    """For pieces of several blocks: the dim they are joined along, how much of it is of one block, and how
    far the next block is in the global tensor."""

    def places(self, indices: Tensor) -> Tensor:
        """Indices `[n, dims]` of elements of this rank's tensor as those in the global one."""
        if self.flat is not None:
            sizes, first = self.flat
            row = indices.new_tensor([prod(sizes[dim + 1 :]) for dim in range(indices.shape[1])])
            start = indices @ row if indices.shape[1] > 1 else indices[:, 0]
            indices = torch.stack(torch.unravel_index(start + first, sizes), 1)
        if self.joined is not None:
            dim, piece, stride = self.joined
            indices = indices.clone()
            indices[:, dim] = indices[:, dim] // piece * stride + indices[:, dim] % piece
        return indices + torch.tensor(self.offsets or 0, device=indices.device)


def origin_of(layout: Layout, coordinate: Mapping[str, int]) -> Origin:
    """Where the piece at a coordinate begins."""
    boxes, interval = layout.boxes(coordinate), layout.interval(coordinate)
    if len(boxes) > 1:
        dim = layout.blocked_dim or 0
        stride = boxes[1].offsets[dim] - boxes[0].offsets[dim]
        flat = None if interval is None else (layout.sizes(coordinate), interval.start)
        return Origin(boxes[0].offsets, flat, (dim, boxes[0].sizes[dim], stride))
    (region,) = boxes
    if interval is None:
        return Origin(region.offsets)
    return Origin(region.offsets, (region.sizes or (1,), interval.start))


HERE = Origin()
"""What a rank has whole."""


Alternatives = Callable[[], Iterable[tuple[str, Tensor]]]
"""What a tensor may be by mistake, as sentences with the value that it then has."""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what the reference says, on one rank."""

    location: Location
    largest: float
    """Absolute; infinity where one of the two is no number."""
    size: float
    """Of the reference's tensor: see `Tolerance`."""
    allowed: float
    """What rounding explains, absolute."""
    shape: tuple[int, ...]
    """Of this rank's tensor."""
    box: tuple[tuple[int, int], ...]
    """Per dim the first and one past the last index of what differs, in the global tensor."""
    whole_box: bool
    """Whether that is all of this rank's tensor."""
    share: float
    """Of the elements, how many differ: 0 to 1."""
    worst: tuple[int, ...]
    """Index of the element that differs most, in the global tensor."""
    values: tuple[float, float]
    """That element, as it is and as it should be."""
    hint: str = ""
    """What the tensor is instead, where this rank sees it by itself."""
    inside: InnerDifference | None = None
    """Of a layer's output: which module inside is the first that differs."""


@dataclass
class Tally:
    """How many tensors of a phase were compared, and how close they were."""

    compared: int = 0
    different: int = 0
    used: float = 0.0
    """The largest share of what is allowed, among those that are equal."""
    relative: float = 0.0
    """The largest difference relative to the tensor's size, among those that are equal."""
    vague: int = 0
    """How many of those that are equal could not be judged: see `VAGUE`."""


@dataclass(frozen=True)
class Evidence:
    """The tensors of a rank's first difference, flat; long ones are shortened."""

    location: Location
    actual: Tensor
    expected: Tensor
    base: Tensor | None = None
    """What the tensor contains besides what is compared here: what flowed into the layer (with a residual
    connection), a gradient before the micro-batch, a parameter before the step of the optimizer."""


@dataclass
class Findings:
    """What one rank found out."""

    layers: int
    tallies: dict[StepPhase, Tally] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    """The first one first."""
    evidence: Evidence | None = None
    empty: set[Location] = field(default_factory=set)
    """Where this rank has no element, as of a parameter that lies on others."""
    divided: set[int] = field(default_factory=set)
    """Of this rank's layers those with a parameter that is cut over `tp`."""

    def compare(
        self,
        location: Location,
        actual: Tensor,
        expected: Tensor,
        tolerance: Tolerance,
        *,
        origin: Origin = HERE,
        alternatives: Alternatives = tuple,
        base: Tensor | None = None,
        rounding: float | None = None,
        inside: Callable[[], InnerDifference | None] = lambda: None,
    ) -> bool:
        """Whether `actual` is what the reference says. `origin`: where this rank's piece begins.

        `rounding`: the largest machine epsilon of a dtype that it may have passed through. If given, numbers
        that a narrower dtype holds without an error are a difference, where the reference's are not of that
        kind, however near they are. `alternatives`, `base` and `inside` tell more of the first that is
        different: see `Difference`, `Evidence`.
        """
        tally = self.tallies.setdefault(location.phase, Tally())
        tally.compared += 1
        if not actual.numel():
            self.empty.add(location)
        actual, expected = actual.detach(), expected.to(actual.device)
        largest = torch.inf if _misfit(actual, expected) else largest_difference(actual, expected)
        narrower = None if rounding is None else _narrower(actual, expected, rounding)
        if narrower is not None and largest <= tolerance.allowed:
            told, tolerance = f"it was rounded to {narrower} on the way", Tolerance(tolerance.size, 0.0)
            alternatives = partial(one_alternative, told, actual)
        if largest <= tolerance.allowed:
            tally.used = max(tally.used, largest / tolerance.allowed if largest else 0.0)
            tally.relative = max(
                tally.relative, largest / tolerance.size if largest and tolerance.size else 0.0
            )
            tally.vague += tolerance.allowed > VAGUE * tolerance.size
            return True
        tally.different += 1
        if self.evidence is None or location.order(self.layers) < self.evidence.location.order(self.layers):
            fits = base is not None and base.shape == actual.shape and base.dtype == actual.dtype
            through = _shortened(base) if base is not None and fits else None
            self.evidence = Evidence(location, _shortened(actual), _shortened(expected), through)
            hint = _hint(actual, expected, tolerance, alternatives)
            found = _describe(location, actual, expected, tolerance, origin, hint)
            self.differences.insert(0, replace(found, inside=inside()))
        elif len(self.differences) < REMEMBERED:
            self.differences.append(_describe(location, actual, expected, tolerance, origin, ""))
        return False


def _misfit(actual: Tensor, expected: Tensor) -> str:
    """The shape or dtype that a tensor has instead of the right one; empty where both are right."""
    if actual.shape != expected.shape:
        return f"its shape is {list(actual.shape)} instead of {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"its dtype is {_named(actual.dtype)} instead of {_named(expected.dtype)}"
    return ""


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrower(actual: Tensor, expected: Tensor, rounding: float) -> str | None:
    """The dtype, of a larger machine epsilon than `rounding`, that `actual` was rounded to; None: to none.

    Looks at those elements that the dtype does not hold in `expected`, if there are at least `TELLING`.
    """
    if _misfit(actual, expected) or actual.dtype not in (torch.float32, torch.float64):
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps > rounding:
            looked = expected != expected.to(dtype).to(expected.dtype)
            own = actual[looked]
            if own.numel() >= TELLING and torch.equal(own, own.to(dtype).to(own.dtype)):
                return _named(dtype)
    return None


def one_alternative(told: str, actual: Tensor) -> Iterable[tuple[str, Tensor]]:
    """What a tensor is by mistake, where that is known."""
    return [(told, actual)]


def _hint(actual: Tensor, expected: Tensor, tolerance: Tolerance, alternatives: Alternatives) -> str:
    """What a tensor is instead."""
    if told := _misfit(actual, expected):
        return told
    fitting = (
        text for text, value in alternatives() if largest_difference(actual, value) <= tolerance.allowed
    )
    return next(fitting, "")


def _describe(
    location: Location, actual: Tensor, expected: Tensor, tolerance: Tolerance, origin: Origin, hint: str
) -> Difference:
    """Where two tensors differ, and how."""
    if _misfit(actual, expected) or not actual.numel():
        nowhere, shape = (math.nan, math.nan), tuple(actual.shape)
        return Difference(
            location, math.inf, tolerance.size, tolerance.allowed, shape, (), True, 1.0, (), nowhere, hint
        )
    far = elementwise_difference(actual, expected)
    if actual.is_complex():
        far = far.amax(-1)
    far = far.reshape(actual.shape or (1,))
    wrong = (far > tolerance.allowed).nonzero()
    low, high = wrong.amin(0).tolist(), wrong.amax(0).tolist()
    worst = torch.stack(torch.unravel_index(far.argmax(), far.shape))
    here, there = actual.reshape(far.shape)[tuple(worst)], expected.reshape(far.shape)[tuple(worst)]
    outside = origin.places(wrong)
    return Difference(
        location=location,
        largest=float(far.max()),
        size=tolerance.size,
        allowed=tolerance.allowed,
        shape=tuple(actual.shape),
        box=tuple((int(index.min()), int(index.max()) + 1) for index in outside.T),
        whole_box=all(a == 0 and b + 1 == n for a, b, n in zip(low, high, far.shape, strict=True)),
        share=len(wrong) / far.numel(),
        worst=tuple(origin.places(worst[None])[0].tolist()),
        values=(_number(here), _number(there)),
        hint=hint,
    )


def _number(element: Tensor) -> float:
    return float(element.abs() if element.is_complex() else element)


def _shortened(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:SHOWN].to("cpu", copy=True)
