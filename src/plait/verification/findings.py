"""Comparison of one rank's tensors with the reference, and the differences found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from plait.plan.layout.layout import Layout
from plait.plan.layout.shards import shard
from plait.verification.reference.differences_within_layers import InnerDifference
from plait.verification.reference.recording import Tolerance, elementwise_difference, largest_difference
from plait.verification.step_location import Location, StepPhase

MAX_LISTED = 64
"""Differences of one rank that are kept; further ones are only counted."""
EVIDENCE_ELEMENTS = 1 << 20
"""Elements of the first differing tensor that a rank sends, for causes that several ranks show together."""

MIN_ROUNDED_ELEMENTS = 32
"""Least number of elements, not representable in a narrower dtype, that can prove a rounding to it."""
NEAR_SHARE = 0.9
"""Share of elements, at least, that a rounding explains: others may have been rounded before, too."""
INCONCLUSIVE_SHARE = 0.5
"""Share of a tensor's size; with a larger tolerance, equality is inconclusive."""


@dataclass(frozen=True)
class ComparedBox:
    """Which part of a global tensor a rank holds; `of` extracts it from any tensor of that shape."""

    shape: tuple[int, ...]
    of: Callable[[Tensor], Tensor]


def box_of(layout: Layout, coordinate: Mapping[str, int]) -> ComparedBox:
    """Return which part of a tensor with `layout` the rank at `coordinate` holds."""
    return ComparedBox(layout.shape, lambda whole: shard(whole, layout, coordinate))


Alternatives = Iterable[tuple[str, Tensor]]
"""Values that a tensor may have by mistake, each after a sentence; iterated for a first difference only."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the reference on one rank."""

    location: Location
    largest: float
    """Largest absolute difference; infinity where only one of the two is NaN."""
    size: float
    """Size of the reference's tensor: see `Tolerance`."""
    allowed: float
    """Largest absolute difference that rounding explains."""
    shape: tuple[int, ...]
    """Shape of this rank's tensor."""
    box: tuple[tuple[int, int], ...]
    """Bounding box of the differing elements: start and stop per dim, in the global tensor."""
    whole_box: bool
    """Whether `box` is all of this rank's tensor."""
    share: float
    """Fraction of the elements that differ."""
    worst: tuple[int, ...]
    """Index of the element with the largest difference, in the global tensor."""
    values: tuple[float, float]
    """Actual and expected value of that element."""
    hint: str = ""
    """Sentence that describes the wrong tensor, where this rank can determine it alone."""
    inside: InnerDifference | None = None
    """The first differing module inside of the layer, for a layer's output."""


@dataclass
class Tally:
    """How many tensors of a phase were compared, and the largest differences within tolerance."""

    compared: int = 0
    different: int = 0
    used: float = 0.0
    """Largest difference of an equal tensor, relative to its tolerance."""
    relative: float = 0.0
    """Largest difference of an equal tensor, relative to its size."""
    vague: int = 0
    """Number of equal tensors of inconclusive equality: see `INCONCLUSIVE_SHARE`."""


@dataclass(frozen=True)
class Evidence:
    """Actual and expected values of a rank's first differing tensor, flat, at most `EVIDENCE_ELEMENTS`."""

    location: Location
    actual: Tensor
    expected: Tensor
    base: Tensor | None = None
    """A tensor that the compared one is added to: a layer's input (with a residual connection), the gradient
    before the micro-batch, the parameter before the optimizer step."""


@dataclass
class Findings:
    """Counts of compared tensors per phase, and the differences found, on one rank."""

    layers: int
    """Number of layers of the model."""
    tallies: dict[StepPhase, Tally] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    """The earliest difference is first; the others are in the order of comparison."""
    evidence: Evidence | None = None
    empty: set[Location] = field(default_factory=set)
    """Locations of tensors of which this rank has no element, as where other ranks hold a parameter."""
    partitioned: set[int] = field(default_factory=set)
    """This rank's layers with a parameter that is partitioned over `tp`."""
    with_experts: set[int] = field(default_factory=set)
    """This rank's layers with experts that are divided over `ep` and `etp`."""
    with_router_losses: set[int] = field(default_factory=set)
    """This rank's layers with a router that has auxiliary losses."""
    left_out: str = ""
    """Why the candidate was not saved and loaded, though that was to be compared; the same on all ranks."""

    def compare(
        self,
        location: Location,
        actual: Tensor,
        expected: Tensor,
        tolerance: Tolerance,
        *,
        box: ComparedBox | None = None,
        alternatives: Alternatives = (),
        base: Tensor | None = None,
        rounding: float | None = None,
        inside: Callable[[], InnerDifference | None] = lambda: None,
    ) -> bool:
        """Compare `actual` with `expected`, count it, list it if it differs; return whether they are equal.

        `box`: which part of a tensor both are; None: all of it. `rounding`: the largest machine epsilon of a
        dtype that `actual` may have passed through. If given, a tensor that was rounded to a narrower dtype
        is a difference, within the tolerance too. `alternatives`, `base` and `inside` describe the first
        difference: see `Difference` and `Evidence`.
        """
        tally = self.tallies.setdefault(location.phase, Tally())
        tally.compared += 1
        if not actual.numel():
            self.empty.add(location)
        actual, expected = actual.detach(), expected.detach().to(actual.device)
        largest = torch.inf if _misfit(actual, expected) else largest_difference(actual, expected)
        narrower = None if rounding is None else _narrower(actual, expected, rounding)
        if narrower is not None and (largest <= tolerance.allowed or _is_near(actual, expected, narrower)):
            tolerance = Tolerance(tolerance.size, 0.0)
            alternatives = [(f"it was rounded to {narrower} on the way", actual)]
        if largest <= tolerance.allowed:
            if largest:
                tally.used = max(tally.used, largest / tolerance.allowed)
                tally.relative = max(tally.relative, largest / tolerance.size if tolerance.size else 0.0)
            tally.vague += tolerance.allowed > INCONCLUSIVE_SHARE * tolerance.size
            return True
        tally.different += 1
        if self.evidence is None or location.order(self.layers) < self.evidence.location.order(self.layers):
            fits = base is not None and base.shape == actual.shape and base.dtype == actual.dtype
            shortened = _shortened(base) if base is not None and fits else None
            self.evidence = Evidence(location, _shortened(actual), _shortened(expected), shortened)
            hint = _hint(actual, expected, tolerance, alternatives)
            found = _describe(location, actual, expected, tolerance, box, hint)
            self.differences.insert(0, replace(found, inside=inside()))
        elif len(self.differences) < MAX_LISTED:
            self.differences.append(_describe(location, actual, expected, tolerance, box, ""))
        return False


def _misfit(actual: Tensor, expected: Tensor) -> str:
    """Return a sentence about a wrong shape or dtype; "" if both are right."""
    if actual.shape != expected.shape:
        return f"its shape is {list(actual.shape)} instead of {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"its dtype is {_named(actual.dtype)} instead of {_named(expected.dtype)}"
    return ""


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrower(actual: Tensor, expected: Tensor, rounding: float) -> str | None:
    """Return the dtype to which `actual` was rounded, if its machine epsilon exceeds `rounding`; or None.

    Looks at the elements of which `expected` is not representable in the dtype.
    """
    if _misfit(actual, expected) or actual.dtype not in (torch.float32, torch.float64):
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps > rounding:
            own = actual[expected != expected.to(dtype).to(expected.dtype)]
            if own.numel() >= MIN_ROUNDED_ELEMENTS and torch.equal(own, own.to(dtype).to(own.dtype)):
                return _named(dtype)
    return None


def _is_near(actual: Tensor, expected: Tensor, narrower: str) -> bool:
    """Return whether each element is as near to the expected one as the narrower dtype has a number."""
    limits = torch.finfo(getattr(torch, narrower))
    step = limits.eps * expected.abs().clamp(min=limits.smallest_normal)
    return bool(((actual - expected).abs() <= step).all())


def has_only_small_digits_of_float16(actual: Tensor, expected: Tensor) -> bool:
    """Return whether elements below float16's normal range have only the digits that float16 has there.

    Not where they are also off by more than one such digit, as small sums of large summands in float16 are.
    """
    if _misfit(actual, expected):
        return False
    limits, half = torch.finfo(torch.float16), expected.to(torch.float16).to(expected.dtype)
    small = (expected != half) & (expected.abs() < limits.smallest_normal)
    own, near = actual[small], (actual - expected)[small].abs() <= limits.eps * limits.smallest_normal
    has_few_digits = torch.equal(own, own.to(torch.float16).to(own.dtype))
    return own.numel() >= MIN_ROUNDED_ELEMENTS and has_few_digits and float(near.double().mean()) > NEAR_SHARE


def _hint(actual: Tensor, expected: Tensor, tolerance: Tolerance, alternatives: Alternatives) -> str:
    """Return a sentence on a wrong shape or dtype, or on the mistake whose value `actual` equals; else ""."""
    if misfit := _misfit(actual, expected):
        return misfit
    fitting = (text for text, value in alternatives if largest_difference(actual, value) <= tolerance.allowed)
    return next(fitting, "")


def _describe(
    location: Location,
    actual: Tensor,
    expected: Tensor,
    tolerance: Tolerance,
    box: ComparedBox | None,
    hint: str,
) -> Difference:
    """Return a `Difference`: where in the tensor, and by how much, `actual` differs from `expected`."""
    if _misfit(actual, expected) or not actual.numel():
        nowhere, shape = (math.nan, math.nan), tuple(actual.shape)
        return Difference(
            location, math.inf, tolerance.size, tolerance.allowed, shape, (), True, 1.0, (), nowhere, hint
        )
    far = elementwise_difference(actual, expected)
    if actual.is_complex():
        far = far.amax(-1)
    far = far.reshape(-1).cpu()
    wrong, worst = (far > tolerance.allowed).nonzero()[:, 0], far.argmax()
    local, whole = actual.shape or (1,), (actual.shape if box is None else box.shape) or (1,)
    flat = torch.arange(len(far))  # by element, its index in the flattened global tensor
    if box is not None:
        flat = box.of(torch.arange(prod(box.shape)).view(box.shape)).reshape(-1)
    return Difference(
        location=location,
        largest=float(far.max()),
        size=tolerance.size,
        allowed=tolerance.allowed,
        shape=tuple(actual.shape),
        box=_box_of(flat[wrong], whole),
        whole_box=_box_of(wrong, local) == tuple((0, size) for size in local),
        share=len(wrong) / len(far),
        worst=tuple(int(index) for index in torch.unravel_index(flat[worst], whole)),
        values=(_number(actual.reshape(-1)[worst]), _number(expected.reshape(-1)[worst])),
        hint=hint,
    )


def _box_of(flat: Tensor, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the bounding box of flat indices in a tensor of `shape`: start and stop per dim."""
    return tuple((int(index.min()), int(index.max()) + 1) for index in torch.unravel_index(flat, shape))


def _number(element: Tensor) -> float:
    return float(element.abs() if element.is_complex() else element)


def _shortened(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:EVIDENCE_ELEMENTS].to("cpu", copy=True)
