"""Hypotheses about one tensor: zero, a multiple of the expected, or with a layer's input added too often."""

from __future__ import annotations

import math

from plait.verification.diagnosis.misplaced_values import range_of
from plait.verification.diagnosis.symptoms import FITS, ROUGHLY, Symptoms, bases_of, close, of_the_optimizer
from plait.verification.location import StepPhase

NEAR_ONE = 1e-2
"""Factors of a parameter nearer to 1 than this show nothing: an optimizer step changes little of it."""
ENOUGH = 4
"""Least number of elements for which a multiple is not a coincidence."""
EXACTLY = 1e-9
"""Relative distance of a ratio of two numbers from a degree of the plan, at most."""
SIMPLE = 1e-5
"""Distance of a factor from a small fraction, at most."""


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
    """Return a sentence if the tensor, or what a phase added to it, is wrong by a factor; else None."""
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
        return f"{what} is {product_of(ratio)} times what it should be{_reason(ratio, symptoms)}"
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
    return f"it is {product_of(ratio)} times what it should be{said}" if said else None


def _reason(ratio: float, symptoms: Symptoms) -> str:
    """Return why a tensor may be `ratio` times the expected one, as the continuation of a sentence."""
    if symptoms.phase is StepPhase.OPTIMIZER:
        return f": the gradients are equal, so {of_the_optimizer(symptoms.plan)}"
    if symptoms.phase is StepPhase.CLIP:
        return ": the gradients before it are equal, so they are clipped by another norm, or to another bound"
    is_whole = ratio > 1.5 and abs(ratio - round(ratio)) < ROUGHLY
    counts = f", or counts {product_of(ratio)} times" if is_whole else ""
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
    """Return by name the degrees above 1 (tp, cp, dp, micro-batches, pp) over which tensors may be summed."""
    plan, phase = symptoms.plan, symptoms.phase
    if phase in (
        StepPhase.LOAD,
        StepPhase.INITIAL,
        StepPhase.INPUT,
        StepPhase.PARAMETERS,
        StepPhase.MESSAGE,
        StepPhase.GRADIENT_MESSAGE,
    ):
        return {}  # nothing is summed
    inside = phase in (StepPhase.FORWARD, StepPhase.INPUT_GRADIENT)
    degrees = {"tp": plan.tp} if symptoms.partitioned or not inside else {}
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
    if symptoms.phase not in AROUND:
        return None
    what = AROUND[symptoms.phase]
    if abs(times + 1) < ROUGHLY:
        return f"{what} is missing in it: the residual connection around the layer is left out"
    return (
        f"{what} is in it {product_of(times)} times too often: a residual connection is scaled, doubled, or "
        "where there is none"
    )


AROUND = {
    StepPhase.FORWARD: "the layer's input",
    StepPhase.INPUT_GRADIENT: "the gradient of the layer's output",
}


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


def product_of(ratio: float) -> str:
    """Return a factor as text: as a small fraction if it is one, such as `3/2`."""
    if ratio != 1 and abs(ratio - 1) < NEAR_ONE:
        return f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.1e}"
    for bottom in (1, 2, 3, 4, 6, 8):
        top = round(ratio * bottom)
        if top and abs(ratio * bottom - top) < SIMPLE:
            return str(top) if bottom == 1 else f"{top}/{bottom}"
    return f"{ratio:.6g}"
