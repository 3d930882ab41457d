"""Hypotheses about one tensor: zero, a multiple of the expected, with a layer's input added too often.

Or its values are misplaced: transposed, shifted, permuted, or wrong in only a part of the tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.plan.axes import sizes_of_plan
from plait.verification.diagnosis.symptoms import (
    FITS,
    NOT_SUMMED,
    ROUGHLY,
    Symptoms,
    bases_of,
    close,
    of_the_optimizer,
)
from plait.verification.step_location import StepPhase

NEAR_ONE = 1e-2
"""Factors of a parameter nearer to 1 than this show nothing: an optimizer step changes little of it."""
ENOUGH = 4
"""Least number of elements for which a multiple is not a coincidence."""
EXACTLY = 1e-9
"""Relative distance of a ratio of two numbers from a degree of the plan, at most."""
SIMPLE = 1e-5
"""Distance of a factor from a small fraction, at most."""
SHIFTS = (1, -1, 2, -2)
SLICES = 4096
"""Size of a dim, at most, for which a permutation is searched."""
SHOWN = 4
"""Permuted slices that a sentence lists."""


def no_number(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor is NaN or infinite where the reference is finite; else None."""
    actual, expected = symptoms.pair
    if bool(actual.isfinite().all()) or not bool(expected.isfinite().all()):
        return None
    return (
        "it is not a number where the reference is: a division by zero, an overflow, or memory that was "
        "never written"
    )


def zero(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor is zero, or zero wherever it differs; else None."""
    actual, expected = symptoms.pair
    if not len(actual) or actual.shape != expected.shape:
        return None
    if not float(actual.abs().max()) and float(expected.abs().max()):
        return "it is zero: it was never computed, or never added or sent"
    wrong = (actual - expected).abs() > symptoms.difference.allowed
    if int(wrong.sum()) < ENOUGH or bool(actual[wrong].any()):
        return None
    part = range_of(symptoms)
    where = "" if part is None else f" ({part[1]}:{part[2]} of dim {part[0]})"
    return (
        f"where it differs{where} it is zero: these elements were never computed, added or sent, or are "
        "masked where they should not be"
    )


def factor(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor, or what the phase adds to it, is wrong by a factor; else None."""
    first, phase = symptoms.first, symptoms.phase
    if first.actual.shape != first.expected.shape:
        return None
    if len(first.expected) == 1:
        return _factor_of_one_number(symptoms)
    for what, base in bases_of(first, phase):
        actual, expected = (first.actual - base).double(), (first.expected - base).double()
        square = float(expected @ expected)
        if not square:
            continue
        ratio = float(actual @ expected) / square
        is_whole = what == "all of it"
        if is_whole and (abs(ratio) < FITS or (abs(ratio - 1) < NEAR_ONE and phase is StepPhase.OPTIMIZER)):
            continue
        if not math.isfinite(ratio) or not close(actual, ratio * expected, symptoms.slack):
            continue
        if abs(ratio) < FITS:
            return _nothing_added(phase)
        return f"{what} is {factor_text(ratio)} times what it should be{_reason(ratio, symptoms)}"
    return None


def _nothing_added(phase: StepPhase) -> str:
    """Return the sentence for a tensor that `phase` should have changed and that still has its old value."""
    if phase is StepPhase.INPUT_GRADIENT:
        return "it is the gradient of the layer's output, unchanged: the layer's own backward is not in it"
    if phase is StepPhase.FORWARD:
        return "it is the layer's input, unchanged: either the layer is skipped, or what it adds is zero"
    if phase is StepPhase.OPTIMIZER:
        return "it was not updated"
    return "nothing of this micro-batch is in it: it was not added, or is zero"


def _factor_of_one_number(symptoms: Symptoms) -> str | None:
    """Return a sentence if a mean loss is wrong by a factor that is a degree of the plan; else None."""
    actual, expected = (float(tensor[0]) for tensor in symptoms.pair)
    if not expected or symptoms.phase not in (StepPhase.MEAN_LOSS, StepPhase.EVALUATION):
        return None
    ratio = actual / expected
    said = _degrees_of(ratio, symptoms, EXACTLY)
    return f"it is {factor_text(ratio)} times what it should be{said}" if said else None


def _reason(ratio: float, symptoms: Symptoms) -> str:
    """Return why a tensor may be `ratio` times the expected one, as the continuation of a sentence."""
    if symptoms.phase is StepPhase.OPTIMIZER:
        return f": the gradients are equal, so {of_the_optimizer(symptoms.plan)}"
    if symptoms.phase is StepPhase.CLIP:
        return ": the gradients before it are equal, so they are clipped by another norm, or to another bound"
    is_whole = ratio > 1.5 and abs(ratio - round(ratio)) < ROUGHLY
    counts = f", or counts {factor_text(ratio)} times" if is_whole else ""
    scaled = f": it is scaled by one number too many or too few{counts}"
    return _degrees_of(ratio, symptoms, ROUGHLY) or scaled


def _degrees_of(ratio: float, symptoms: Symptoms, slack: float) -> str:
    """Return text for a `ratio` close to a parallel degree or to 1 / degree; "" for any other."""
    degrees = _degrees(symptoms)
    more = [name for name, size in degrees.items() if abs(ratio - size) < slack * size]
    less = [name for name, size in degrees.items() if abs(ratio * size - 1) < slack]
    if more:
        return (
            f", the size of {' and of '.join(more)}: either a sum is taken twice there, or of what is the "
            "same everywhere, or it is scaled by one number too many or too few"
        )
    if less:
        return (
            f", one over {' and '.join(less)}: either averaged instead of summed, or divided for another "
            "reason"
        )
    return ""


def _degrees(symptoms: Symptoms) -> dict[str, int]:
    """Return by name the degrees above 1 (tp, cp, dp, …, micro-batches) over which tensors may be summed."""
    plan, phase = symptoms.plan, symptoms.phase
    if phase in (*NOT_SUMMED, StepPhase.MESSAGE, StepPhase.GRADIENT_MESSAGE):
        return {}
    inside = phase in (StepPhase.FORWARD, StepPhase.INPUT_GRADIENT)
    degrees = {"tp": plan.tp} if symptoms.partitioned or not inside else {}
    if symptoms.of_experts:
        degrees |= {"ep": plan.ep, "etp": plan.etp, "edp": sizes_of_plan(plan).get("edp", 1)}
    if not inside and phase is not StepPhase.LOSS:
        degrees |= {"cp": plan.cp, "dp": plan.dp, "the number of micro-batches": plan.microbatches}
    if phase not in (StepPhase.FORWARD, StepPhase.INPUT_GRADIENT, StepPhase.LOSS, StepPhase.WEIGHT_GRADIENT):
        degrees |= {"pp": plan.pp}
    return {name: size for name, size in degrees.items() if size > 1}


def multiple_of_input(symptoms: Symptoms) -> str | None:
    """Return a sentence if a layer's input (or a parameter's old value) is added a wrong number of times."""
    base = symptoms.first.base
    actual, expected = symptoms.pair
    if base is None or len(actual) < ENOUGH or actual.shape != expected.shape:
        return None
    base = base.double()
    square, apart = float(base @ base), actual - expected
    times = float(apart @ base) / square if square else 0.0
    if not times or not math.isfinite(times) or not close(apart, times * base, symptoms.slack):
        return None
    if symptoms.phase is StepPhase.OPTIMIZER:
        return (
            f"it differs by {times:.3g} times what the parameter was before: the weight decay is another, "
            "or is left out"
        )
    if symptoms.phase not in (StepPhase.FORWARD, StepPhase.INPUT_GRADIENT):
        return None
    is_forward = symptoms.phase is StepPhase.FORWARD
    what = "the layer's input" if is_forward else "the gradient of the layer's output"
    if abs(times + 1) < ROUGHLY:
        return f"{what} is missing in it: the residual connection around the layer is left out"
    return (
        f"{what} is in it {factor_text(times)} times too often: a residual connection is scaled, doubled, or "
        "where there is none"
    )


def same_for_all(symptoms: Symptoms) -> str | None:
    """Return a sentence if the error is equal at all positions, or in all rows of the batch; else None."""
    pair = symptoms.shaped
    if symptoms.phase is not StepPhase.FORWARD or pair is None or pair[0].dim() < 2:
        return None
    if range_of(symptoms) is not None:
        return None  # a part that is other everywhere
    apart = pair[0] - pair[1]
    rows = apart.reshape(-1, apart.shape[-1])
    if rows.shape[0] > 1 and rows.shape[1] > 1 and close(rows, rows[:1].expand_as(rows), symptoms.slack):
        return (
            "the same row is added to all rows: a constant, as a bias is, counts more than once or is left "
            "out"
        )
    if len(apart) > 1 and apart.dim() > 2 and close(apart, apart[:1].expand_as(apart), symptoms.slack):
        return (
            "the same is added to each row of the batch, whatever its values: something that depends on "
            "positions only counts more than once, is left out, or is another"
        )
    return None


def factor_text(ratio: float) -> str:
    """Return a factor as text: as a small fraction if possible, such as `3/2`, or as `1 + 2.0e-03`."""
    if ratio != 1 and abs(ratio - 1) < NEAR_ONE:
        return f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.1e}"
    for bottom in (1, 2, 3, 4, 6, 8):
        top = round(ratio * bottom)
        if top and abs(ratio * bottom - top) < SIMPLE:
            return str(top) if bottom == 1 else f"{top}/{bottom}"
    return f"{ratio:.6g}"


def transposed(symptoms: Symptoms) -> str | None:
    """Return a sentence if a square matrix equals the transpose of the expected one; else None."""
    pair = symptoms.shaped
    if pair is None or pair[0].dim() != 2 or pair[0].shape[0] != pair[0].shape[1] or len(pair[0]) < 2:
        return None
    return "it is transposed" if close(pair[0], pair[1].T, symptoms.slack) else None


def shifted(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor is shifted by a few positions along a dim; else None."""
    pair = symptoms.shaped
    if pair is None:
        return None
    actual, expected = pair
    for dim, size in enumerate(actual.shape):
        for shift in SHIFTS:
            kept = size - abs(shift)
            if kept < 2 or kept <= size / 2:
                continue  # halves that changed places
            later = actual.narrow(dim, max(shift, 0), kept), expected.narrow(dim, max(-shift, 0), kept)
            if not close(*later, symptoms.slack) or later[1].max() - later[1].min() <= symptoms.slack:
                continue
            places = "1 place" if abs(shift) == 1 else f"{abs(shift)} places"
            return f"it is shifted: along dim {dim} it stands {places} {'later' if shift > 0 else 'earlier'}"
    return None


def permuted(symptoms: Symptoms) -> str | None:
    """Return a sentence if the values are the expected ones, permuted along a dim or overall; else None."""
    actual, expected = symptoms.pair
    if len(actual) < 2 or not close(actual.sort().values, expected.sort().values, symptoms.slack):
        return None
    pair = symptoms.shaped
    gathered = "; parts were gathered to other places" if symptoms.phase is StepPhase.PARAMETERS else ""
    for dim in range(0 if pair is None else pair[0].dim()):
        assert pair is not None
        order = _order_along(dim, *pair, symptoms.slack)
        if order is not None:
            moved = [f"{there} at {here}" for here, there in enumerate(order) if here != there]
            more = f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
            return f"dim {dim} is in another order: it has {', '.join(moved[:SHOWN])}{more}{gathered}"
    return f"the same numbers stand in another order{gathered}"


def _order_along(dim: int, actual: Tensor, expected: Tensor, slack: float) -> list[int] | None:
    """Return the index in `expected` of each slice of `actual` along `dim`; None if one is not found."""
    here, there = (one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in (actual, expected))
    if not 1 < len(here) <= SLICES:
        return None
    weights = torch.rand(here.shape[1], dtype=here.dtype, generator=torch.Generator().manual_seed(0))
    order = torch.empty(len(here), dtype=torch.int64)
    order[(here @ weights).argsort()] = (there @ weights).argsort()
    if not close(here, there[order], slack):
        return None
    return [int(location) for location in order]


def part_of_a_dim(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor differs in a single range of a single dim only; else None."""
    part = range_of(symptoms)
    return None if part is None else f"only {part[1]}:{part[2]} of dim {part[0]} differs"


def positions(symptoms: Symptoms) -> str | None:
    """Return a sentence if a layer's output is right at only its first or last positions; else None."""
    part = range_of(symptoms)
    if part is None or symptoms.phase is not StepPhase.FORWARD:
        return None
    dim, start, stop, size = part
    if not 0 < dim < len(symptoms.difference.shape) - 1:
        return None
    found = f"only {start}:{stop} of dim {dim} differs"
    if start and stop == size and start <= size / 2:
        return (
            f"{found}: if that is a sequence, its first {_positions(start)} right, as where attention has "
            "wrong scores, rotary angles or a wrong mask, which the first positions, that see little, do "
            "not show"
        )
    if not start and stop >= size / 2:
        return (
            f"{found}: if that is a sequence, its last {_positions(size - stop)} right, as where a mask "
            "lets positions see what comes after them, which the last cannot"
        )
    return None


def range_of(symptoms: Symptoms) -> tuple[int, int, int, int] | None:
    """Return (dim, start, stop, size of the dim) if the tensor differs in one range of one dim; else None."""
    difference = symptoms.difference
    if difference.whole_box or len(difference.box) != len(difference.shape):
        return None
    volume = math.prod(stop - start for start, stop in difference.box)
    if difference.share * math.prod(difference.shape) < volume / 2:
        return None  # scattered elements, by chance not in all rows
    parts = [
        (dim, start, stop, size)
        for dim, ((start, stop), size) in enumerate(zip(difference.box, difference.shape, strict=True))
        if stop - start < size
    ]
    return parts[0] if len(parts) == 1 else None


def _positions(count: int) -> str:
    return "position is" if count == 1 else f"{count} positions are"
