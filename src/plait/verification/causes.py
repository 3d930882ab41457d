"""What a difference looks like says what probably caused it: a table of signatures, the surest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from plait.comm.coordinates import axes_of, index_along, sizes_of
from plait.plan import Plan
from plait.verification.difference import Difference, Evidence
from plait.verification.place import Phase

AXES = ("tp", "dp", "pp")
FITS = 1e-3
"""A signature fits where it explains the difference but for this part of it."""
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilons."""
SAME_NORM = 1e-6
"""Relative: a norm nearer than this counts all that it has to."""
NEAR_ONE = 1e-2
"""A parameter off by such a factor says nothing: a step of the optimizer is a small part of it."""


@dataclass(frozen=True)
class Symptoms:
    """The first difference as all ranks see it."""

    difference: Difference
    evidence: Mapping[int, Evidence]
    """Of the ranks whose first difference this is."""
    coordinates: Sequence[Mapping[str, int]]
    """Of every rank."""
    judges: Sequence[int]
    """The ranks that compared a tensor at this place."""
    plan: Plan

    @property
    def slack(self) -> float:
        """By how much what a signature says may miss the tensor."""
        return FITS * self.difference.largest

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Actual and expected on the first rank that differs, flat float64."""
        first = self.evidence[min(self.evidence)]
        return first.actual.double(), first.expected.double()

    def neighbours(self, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from the first that is wrong along `axes` only, itself included."""
        own = self.coordinates[min(self.evidence)]
        free = {part for axis in axes for part in axes_of(axis)}
        return [
            rank
            for rank, coordinate in enumerate(self.coordinates)
            if all(index == own[axis] for axis, index in coordinate.items() if axis not in free)
        ]

    @property
    def axes(self) -> Sequence[str]:
        """Those over which something may be summed: what is cut over `shard`, over `replicate`."""
        is_hybrid = self.plan.shards and self.plan.replicate > 1
        return ("tp", "replicate", "dp", "pp") if is_hybrid else AXES


def likely_cause(symptoms: Symptoms) -> str:
    """One sentence; where nothing in the table fits, what is usual for the phase."""
    usual = USUAL[symptoms.difference.place.phase]
    fitting = (row(symptoms) for row in TABLE)
    found = symptoms.difference.hint or next((text for text in fitting if text), usual)
    return "; ".join([found, *_circumstances(symptoms)]) + "."


def no_number(symptoms: Symptoms) -> str | None:
    """NaN or infinity where the reference has a number."""
    actual, expected = symptoms.pair
    if bool(actual.isfinite().all()) or not bool(expected.isfinite().all()):
        return None
    return "it is not a number where the reference is: a division by zero, or memory that was never written"


def summands(symptoms: Symptoms) -> str | None:
    """The ranks along one axis, or two, hold parts whose sum is right."""
    first = symptoms.evidence[min(symptoms.evidence)]
    for axes in (*((axis,) for axis in symptoms.axes), *combinations(symptoms.axes, 2)):
        alike = [symptoms.evidence[rank] for rank in symptoms.neighbours(axes) if rank in symptoms.evidence]
        alike = [one for one in alike if torch.equal(one.expected, first.expected)]
        if len(alike) < 2 or any(one.actual.shape != first.expected.shape for one in alike):
            continue
        if all(torch.equal(one.actual, first.actual) for one in alike):
            continue  # as after a mean: it is a factor
        over = " and ".join(axes)
        for what, base in _bases(first):
            parts = torch.stack([(one.actual - base).double() for one in alike])
            if _same(parts.sum(0), (first.expected - base).double(), symptoms.slack):
                return f"the ranks of {over} hold summands of {what}: their sum over {over} is missing"
    return None


def nothing(symptoms: Symptoms) -> str | None:
    """Zero."""
    actual, expected = symptoms.pair
    if float(actual.abs().max()) or not float(expected.abs().max()):
        return None
    return "it is zero: it was never computed, or never added or sent"


def factor(symptoms: Symptoms) -> str | None:
    """All of it, or what the layer adds to what flows through it, times the same number."""
    first = symptoms.evidence[min(symptoms.evidence)]
    if first.actual.shape != first.expected.shape:
        return None
    for what, base in _bases(first):
        actual, expected = (first.actual - base).double(), (first.expected - base).double()
        square = float(expected @ expected)
        if not square or len(expected) < 2:
            continue
        ratio = float(actual @ expected) / square
        if abs(ratio - 1) < NEAR_ONE and symptoms.difference.place.phase is Phase.OPTIMIZER:
            continue
        if math.isfinite(ratio) and _same(actual, ratio * expected, symptoms.slack):
            return f"{what} is {_ratio(ratio)} times what it should be{_explained(ratio, symptoms)}"
    return None


def piece_of_another(symptoms: Symptoms) -> str | None:
    """What a neighbour along tp should have."""
    first = symptoms.evidence[min(symptoms.evidence)]
    for rank in symptoms.neighbours(("tp",)):
        other = symptoms.evidence.get(rank, first)
        for (what, own), (_, others) in zip(_bases(first), _bases(other), strict=False):
            if other is not first and _same(first.actual - own, other.expected - others, symptoms.slack):
                return f"{what} is what {_where([rank], symptoms)} should have: pieces go to another rank"
    return None


def same_row_added(symptoms: Symptoms) -> str | None:
    """A bias."""
    shape = symptoms.difference.shape
    if symptoms.difference.place.phase is not Phase.FORWARD or len(shape) < 2 or shape[-1] < 2:
        return None
    actual, expected = symptoms.pair
    whole = len(actual) // shape[-1] * shape[-1]
    rows = (actual - expected)[:whole].view(-1, shape[-1])
    if len(rows) < 2 or not _same(rows, rows[:1].expand_as(rows), symptoms.slack):
        return None
    return "the same row is added to all rows: a bias that counts more than once, or is left out"


def same_numbers(symptoms: Symptoms) -> str | None:
    """A permutation."""
    actual, expected = symptoms.pair
    if len(actual) < 2 or not _same(actual.sort().values, expected.sort().values, symptoms.slack):
        return None
    return "the same numbers stand in another order: rows, heads or pieces are exchanged"


def only_a_box(symptoms: Symptoms) -> str | None:
    """Some rows of one dim."""
    difference = symptoms.difference
    if difference.whole_box or len(difference.box) != len(difference.shape):
        return None
    volume = math.prod(stop - start for start, stop in difference.box)
    if difference.share * math.prod(difference.shape) < volume / 2:
        return None  # scattered, and by chance not everywhere
    parts = [
        f"{start}:{stop} of dim {dim}"
        for dim, ((start, stop), size) in enumerate(zip(difference.box, difference.shape, strict=True))
        if stop - start < size
    ]
    if len(parts) != 1:
        return None
    return (
        f"only {parts[0]} differs: a cut or a mask is off there, or these rows are left out or counted twice"
    )


def later_pieces(symptoms: Symptoms) -> str | None:
    """All ranks but the first, where each has a piece of the sequence."""
    place = symptoms.difference.place
    wrong = {symptoms.coordinates[rank]["tp"] for rank in symptoms.evidence}
    right = {symptoms.coordinates[rank]["tp"] for rank in symptoms.judges} - wrong
    if not symptoms.plan.cuts_sequence or place.phase is not Phase.FORWARD or 0 not in right:
        return None
    return (
        "only later pieces of the sequence differ: something counts positions from the start of a piece, or "
        "looks at positions before it (then its layer must not have the rule sequence), or is cut elsewhere"
    )


def rounded(symptoms: Symptoms) -> str | None:
    """Element by element off by as little as the rounding of a narrower dtype, up and down."""
    actual, expected = symptoms.pair
    if symptoms.difference.allowed > 1e-10 * symptoms.difference.size or len(expected) < 8:
        return None  # only where many more digits are expected, and many elements show it
    apart = actual - expected
    size = expected.abs() + expected.square().mean().sqrt()
    relative = apart.abs() / size
    both = bool((apart > 0).any()) and bool((apart < 0).any())
    # A wrong step of an optimizer moves a parameter by as little as 16 bits round.
    wide = symptoms.difference.place.phase is Phase.OPTIMIZER
    for name, epsilon in list(ROUNDING.items())[: 1 if wide else None]:
        if both and float(relative.max()) < epsilon and float(relative.median()) > epsilon / 256:
            return f"each element is off by as much as {name} rounds: something on the way was {name}"
    return None


def norm_of_more_or_less(symptoms: Symptoms) -> str | None:
    """A norm."""
    if symptoms.difference.place.phase is not Phase.NORM:
        return None
    actual, expected = symptoms.difference.values
    if abs(actual - expected) < SAME_NORM * expected:
        return None
    if actual > expected:
        return (
            "it is too large: what several ranks hold alike is counted by more than one of them, or what "
            "lies between parameters (padding) counts as well"
        )
    return "it is too small: it leaves out what other ranks hold (their stages, or their pieces)"


Row = Callable[[Symptoms], str | None]
TABLE: tuple[Row, ...] = (
    no_number,
    norm_of_more_or_less,
    nothing,
    summands,
    factor,
    piece_of_another,
    rounded,
    same_row_added,
    same_numbers,
    later_pieces,
    only_a_box,
)
USUAL: Mapping[Phase, str] = {
    Phase.BATCH: "the model or the loss depends on how the batch is cut: statistics over rows, or a "
    "loss whose total is no sum over rows",
    Phase.INITIAL: "a parameter starts from another value: another seed, or another piece of it",
    Phase.INPUT: "a rank was given other rows than its own",
    Phase.PARAMETERS: "pieces were gathered from other ranks than those that hold them, in another order, "
    "too early, or not at all",
    Phase.MESSAGE: "what one stage sent is not what the next one got: a buffer that was used again too "
    "early, or messages in another order",
    Phase.FORWARD: "the layer computes something else when it is cut, or its parameters differ",
    Phase.LOSS: "the loss is given other targets, or computes something else from pieces",
    Phase.LOSS_GRADIENT: "the gradient starts with another scale or from other targets",
    Phase.GRADIENT_MESSAGE: "what one stage sent is not what the stage before got: a buffer that was used "
    "again too early, or messages in another order",
    Phase.INPUT_GRADIENT: "the layer's backward is not that of its forward: a sum that is missing, doubled "
    "or averaged at the entrance or the end of a region",
    Phase.WEIGHT_GRADIENT: "the weight gradient is made of another input or output gradient than the "
    "layer's, or is added more than once",
    Phase.REDUCTION: "what the ranks computed is right, but not how it was put together: a reduction that is "
    "missing, done twice, or over other ranks",
    Phase.MEAN_LOSS: "the mean over the global batch is divided by another weight",
    Phase.NORM: "the norm does not count each parameter of the model once",
    Phase.CLIP: "gradients are scaled by another factor, or not all of them",
    Phase.OPTIMIZER: "the optimizer was given another gradient, setting or state, or an update that is not "
    "elementwise sees only a piece",
    Phase.EVALUATION: "evaluation computes something else than training: a mode, or a weight",
}


def _bases(first: Evidence) -> Iterator[tuple[str, Tensor]]:
    """What a part of a tensor may be relative to: nothing, or what flows around the layer."""
    yield "all of it", torch.zeros_like(first.expected)
    if first.base is not None:
        yield "what the layer adds to it", first.base


def _circumstances(symptoms: Symptoms) -> Iterator[str]:
    """On which ranks and micro-batches it is not seen."""
    place = symptoms.difference.place
    equal = [rank for rank in symptoms.judges if rank not in symptoms.evidence]
    if equal:
        yield f"equal on {_where(equal, symptoms)}"
    if place.microbatch is not None and place.microbatch % symptoms.plan.microbatches:
        yield "micro-batches before it are equal"
    if place.step:
        yield "the steps before it are equal"


def _where(ranks: Sequence[int], symptoms: Symptoms) -> str:
    """Ranks, by the axis that sets them apart if there is one."""
    for axis in AXES:
        indices = {_along(symptoms.coordinates[rank], axis, symptoms.plan) for rank in ranks}
        others = {_along(symptoms.coordinates[rank], axis, symptoms.plan) for rank in symptoms.evidence}
        if not indices & others:
            return f"{axis} {', '.join(map(str, sorted(indices)))}"
    return f"rank {', '.join(map(str, ranks))}"


def _along(coordinate: Mapping[str, int], axis: str, plan: Plan) -> int:
    sizes = sizes_of(pp=plan.pp, dp=plan.dp, tp=plan.tp, replicate=plan.replicate)
    return index_along(axis, coordinate, sizes)


def _explained(ratio: float, symptoms: Symptoms) -> str:
    """What a factor may come from, given the degrees."""
    plan, phase = symptoms.plan, symptoms.difference.place.phase
    inside = phase in (Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.LOSS)
    degrees = {"tp": plan.tp}
    if not inside:
        degrees |= {"dp": plan.dp, "the number of micro-batches": plan.microbatches}
    if phase in (Phase.REDUCTION, Phase.NORM, Phase.CLIP):
        degrees |= {"pp": plan.pp}
    more = [name for name, size in degrees.items() if size > 1 and abs(ratio - size) < FITS * size]
    less = [name for name, size in degrees.items() if size > 1 and abs(ratio * size - 1) < FITS]
    if more:
        return f", the size of {' and of '.join(more)}: a sum is taken twice, or every rank adds the same"
    if less:
        return f", one over {' and '.join(less)}: averaged instead of summed, or divided once too often"
    return ": it is scaled once too often, or not at all"


def _ratio(ratio: float) -> str:
    if ratio != 1 and abs(ratio - 1) < NEAR_ONE:
        return f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.1e}"
    for bottom in (1, 2, 3, 4, 6, 8):
        top = round(ratio * bottom)
        if top and abs(ratio * bottom - top) < FITS:
            return str(top) if bottom == 1 else f"{top}/{bottom}"
    return f"{ratio:.6g}"


def _same(a: Tensor, b: Tensor, slack: float) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= slack).all())
