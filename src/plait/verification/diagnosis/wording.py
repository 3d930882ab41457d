"""Numbers, ranks and circumstances in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.comm.coordinates import index_along, sizes_of
from plait.plan import Plan
from plait.verification.diagnosis.symptoms import AXES, Symptoms

NEAR_ONE = 1e-2
SIMPLE = 1e-5
"""By how much a factor may miss a small fraction."""


def product_of(ratio: float) -> str:
    """Return a factor as a small fraction if it is one: `3/2`."""
    if ratio != 1 and abs(ratio - 1) < NEAR_ONE:
        return f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.1e}"
    for bottom in (1, 2, 3, 4, 6, 8):
        top = round(ratio * bottom)
        if top and abs(ratio * bottom - top) < SIMPLE:
            return str(top) if bottom == 1 else f"{top}/{bottom}"
    return f"{ratio:.6g}"


def either(suspects: Sequence[str]) -> str:
    """Return alternatives as `either a, or b, or c`."""
    *most, last = suspects
    return f"either {', or '.join(most)}, or {last}" if most else last


def of_the_optimizer(plan: Plan) -> str:
    """Return what may be wrong with the optimizer where the gradients are right."""
    suspects = ["it has another setting (its rate, a decay, a beta, its epsilon)", "its state is another"]
    if plan.shards or plan.tp > 1:
        suspects.append("its update is not elementwise, and it sees only a piece")
    return either(suspects)


def circumstances(symptoms: Symptoms) -> Iterator[str]:
    """Yield on which ranks, and before which micro-batches and steps, all is equal."""
    location = symptoms.difference.location
    equal = [rank for rank in symptoms.judges if rank not in symptoms.evidence]
    if equal:
        yield f"equal on {ranks_in_words(equal, symptoms)}"
    if location.microbatch is not None and location.microbatch % symptoms.plan.microbatches:
        yield "micro-batches before it are equal"
    if location.step:
        yield "the steps before it are equal"


def ranks_in_words(ranks: Sequence[int], symptoms: Symptoms) -> str:
    """Return ranks by their index along the axis that sets them apart from those that differ, if any."""
    for axis in AXES:
        indices = {_along(symptoms.coordinates[rank], axis, symptoms.plan) for rank in ranks}
        others = {_along(symptoms.coordinates[rank], axis, symptoms.plan) for rank in symptoms.evidence}
        if not indices & others:
            return f"{axis} {', '.join(map(str, sorted(indices)))}"
    return f"rank {', '.join(map(str, ranks))}"


def _along(coordinate: Mapping[str, int], axis: str, plan: Plan) -> int:
    sizes = sizes_of(pp=plan.pp, dp=plan.dp, tp=plan.tp, replicate=plan.replicate)
    return index_along(axis, coordinate, sizes)
