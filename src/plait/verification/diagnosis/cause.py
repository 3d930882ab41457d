"""Finds the probable cause of the first difference: a hypothesis that fits, or what equal tensors exclude."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations

import torch

from plait.plan.axes import sizes_of_plan
from plait.verification.diagnosis.narrower_dtype import rounded
from plait.verification.diagnosis.single_tensor import (
    factor,
    multiple_of_input,
    no_number,
    part_of_a_dim,
    permuted,
    positions,
    same_for_all,
    shifted,
    transposed,
    zero,
)
from plait.verification.diagnosis.symptoms import (
    NOT_SUMMED,
    Symptoms,
    bases_of,
    close,
    either,
    of_the_optimizer,
    ranks_in_words,
)
from plait.verification.step_location import StepPhase

OTHER_SCALES = (
    "what the layer computes is equal, and an operand is cast to float8 by another scale than that of the "
    "largest value of a micro-batch's whole tensor, or of a whole row of it"
)
SAME_NORM = 1e-6
"""Relative difference of two norms of the same elements, at most."""
IN_SHARDS = (
    StepPhase.LOAD,
    StepPhase.INITIAL,
    StepPhase.PARAMETERS,
    StepPhase.REDUCTION,
    StepPhase.OPTIMIZER,
)
"""Phases in which ranks of dp and cp have shards of parameters."""
OF_EXPERTS = (
    "that travel to the ranks of their experts and back are lost, are others, have another weight, or count "
    "more than once"
)


def summands(symptoms: Symptoms) -> str | None:
    """Return a sentence if the sum of the ranks' tensors over mesh axes is the expected tensor; else None."""
    first = symptoms.first
    if symptoms.phase in NOT_SUMMED:
        return None
    for axes in (*((axis,) for axis in symptoms.axes), *combinations(symptoms.axes, 2)):
        alike = [symptoms.evidence[rank] for rank in symptoms.neighbours(axes) if rank in symptoms.evidence]
        alike = [one for one in alike if torch.equal(one.expected, first.expected)]
        if len(alike) < 2 or any(one.actual.shape != first.expected.shape for one in alike):
            continue
        if all(torch.equal(one.actual, first.actual) for one in alike):
            continue  # as after a mean: it is a factor
        over = " and ".join(axes)
        for what, base in bases_of(first, symptoms.phase):
            parts = torch.stack([(one.actual - base).double() for one in alike])
            if close(parts.sum(0), (first.expected - base).double(), symptoms.slack):
                return f"the ranks of {over} hold summands of {what}: their sum over {over} is missing"
    return None


def part_of_another(symptoms: Symptoms) -> str | None:
    """Return a sentence if the tensor equals the expected part of another tp, cp or dp rank; else None."""
    first = symptoms.first
    axes = ("tp", "cp", "dp") if symptoms.phase in IN_SHARDS else ("tp", "cp")
    for rank in (rank for axis in axes for rank in symptoms.neighbours((axis,))):
        other = symptoms.evidence.get(rank, first)
        pairs = zip(bases_of(first, symptoms.phase), bases_of(other, symptoms.phase), strict=False)
        for (what, own), (_, others) in pairs:
            if other is not first and close(first.actual - own, other.expected - others, symptoms.slack):
                where = ranks_in_words([rank], symptoms)
                parts = "shards" if symptoms.phase in IN_SHARDS else "parts"
                return f"{what} is what {where} should have: {parts} go to another rank"
    return None


def later_parts(symptoms: Symptoms) -> str | None:
    """Return a sentence if, under sequence parallelism, `tp` rank 0 is right and others differ; else None."""
    is_cut = symptoms.plan.cuts_sequence and symptoms.phase is StepPhase.FORWARD
    if not is_cut or 0 not in symptoms.equal_along("tp"):
        return None
    return (
        "only later parts of the sequence differ: either something counts positions from the start of a "
        "part, or it looks at positions before it (then its layer must not have the rule sequence), or it "
        "is cut elsewhere"
    )


def other_positions(symptoms: Symptoms) -> str | None:
    """Return a sentence if, under context parallelism, not all `cp` ranks differ in a layer's output."""
    is_cut = symptoms.plan.cp > 1 and symptoms.phase is StepPhase.FORWARD
    if not is_cut or not symptoms.equal_along("cp"):
        return None
    return (
        "only some ranks' positions of the sequence differ: either something counts positions from the start "
        "of a rank's part (plait.positions gives them), or keys of another rank are lost, are others, or are "
        "masked otherwise, or a layer looks at positions beside its attention"
    )


def norm(symptoms: Symptoms) -> str | None:
    """Return a sentence on what a wrong gradient norm leaves out or counts twice; None if it is right."""
    if symptoms.phase is not StepPhase.NORM:
        return None
    actual, expected = symptoms.difference.values
    if abs(actual - expected) < SAME_NORM * expected:
        return None
    plan = symptoms.plan
    for axis in symptoms.axes:
        own = [symptoms.evidence[rank] for rank in symptoms.neighbours((axis,)) if rank in symptoms.evidence]
        squares = math.fsum(float(one.actual[0]) ** 2 for one in own if one.actual.numel())
        if len(own) > 1 and abs(squares - expected**2) < SAME_NORM * expected**2:
            return (
                "it is too small: it leaves out what other ranks hold, for the squares of the ranks of "
                f"{axis} add up to what it should be"
            )
    degrees = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp, "ep": plan.ep}
    times = [
        name for name, size in degrees.items() if size > 1 and abs(actual**2 / expected**2 / size - 1) < 1e-6
    ]
    if times:
        return f"it is too large: as if every square counted on each rank of {' or '.join(times)}"
    if actual > expected:
        alike = (
            "what several ranks hold alike is counted by more than one of them, or " if plan.world > 1 else ""
        )
        return (
            f"it is too large: either {alike}something that is no gradient (padding) counts too, or it is "
            "scaled, or another norm"
        )
    left = " (other ranks', or of some parameters)" if plan.world > 1 else " (of some parameters)"
    return f"it is too small: either it leaves out gradients{left}, or it is another norm"


Hypothesis = Callable[[Symptoms], str | None]
"""Returns a sentence where the evidence fits it and no other known cause."""
HYPOTHESES: tuple[Hypothesis, ...] = (
    *(no_number, norm, summands, zero, factor, multiple_of_input, part_of_another, rounded, same_for_all),
    *(transposed, shifted, permuted, later_parts, positions, other_positions),
)
"""The most certain first."""


def likely_cause(symptoms: Symptoms) -> str:
    """Return the probable cause of the first difference as a sentence, with what is known to be equal."""
    difference = symptoms.difference
    found = difference.hint or next(filter(None, (fits(symptoms) for fits in HYPOTHESES)), None)
    if found is None:
        part = part_of_a_dim(symptoms)
        found = f"{part}; {unexplained(symptoms)}" if part else unexplained(symptoms)
    elif difference.inside is not None:
        found = f"{found}; {difference.inside.sentence}"
    return "; ".join([found, *circumstances(symptoms)]) + "."


def circumstances(symptoms: Symptoms) -> Iterator[str]:
    """Yield phrases that name the ranks, and the earlier micro-batches and steps, that have no difference."""
    location = symptoms.difference.location
    equal = [rank for rank in symptoms.compared_on if rank not in symptoms.evidence]
    if equal:
        yield f"equal on {ranks_in_words(equal, symptoms)}"
    if location.microbatch is not None and location.microbatch % symptoms.plan.microbatches:
        yield "micro-batches before it are equal"
    if location.step:
        yield "the steps before it are equal"


def unexplained(symptoms: Symptoms) -> str:
    """Return possible causes of a difference in this phase of a step, as text, if no hypothesis fits.

    Only features that the plan uses are named: no partition at tp 1, no gather without sharding.
    """
    found = UNEXPLAINED[symptoms.phase]
    return found if isinstance(found, str) else found(symptoms)


def _input(symptoms: Symptoms) -> str:
    others = ["other rows", "changed ones"]
    if symptoms.plan.cp > 1:
        others.insert(1, "other positions")
    return f"the first stage was given other values than its rows of the batch: {either(others)}"


def _forward(symptoms: Symptoms) -> str:
    inside = symptoms.difference.inside
    known = "the layer's input is equal, and what it gives is not"
    if inside is not None:
        return f"{known}: {inside.sentence}"
    suspects = []
    if symptoms.plan.cp > 1:
        suspects.append(
            "its positions are not this rank's, or it sees other keys than those of its documents and window"
        )
    if symptoms.of_experts:
        suspects.append(f"tokens {OF_EXPERTS}")
    if symptoms.partitioned:
        suspects.append("it is cut over tp in a way that it cannot be")
    if suspects:
        return f"{known}: {either([*suspects, 'it computes something else on its own'])}"
    return f"{known}: it computes something else, or with other parameters"


def _loss(symptoms: Symptoms) -> str:
    others = ""
    if symptoms.partitioned:
        others += ", or the loss is put together from parts of the classes in another way"
    if symptoms.plan.cp > 1:
        others += ", or the loss is no sum over positions, or the targets are those of other positions"
    return f"the output is equal: either the targets or the loss itself are others{others}"


def _input_gradient(symptoms: Symptoms) -> str:
    known = "the gradient of the layer's output is equal, and that of its input is not: "
    if symptoms.difference.inside is not None:
        return known + symptoms.difference.inside.sentence
    suspects = ["its backward is not that of its forward", "what it kept of its forward was changed since"]
    if symptoms.partitioned:
        suspects.append(
            "a sum over tp, where its region begins or ends, is wrong (missing, doubled, averaged, rounded)"
        )
    if symptoms.plan.cp > 1:
        suspects.append(
            "a gradient of keys and values that other ranks of cp return is lost, is another rank's, or "
            "counts more than once"
        )
    if symptoms.has_router_losses:
        suspects.append(
            "the losses of its router are others, as where loads are counted over other tokens than those of "
            "the document or the step"
        )
    if symptoms.of_experts:
        suspects.append(f"gradients of tokens {OF_EXPERTS}")
    if symptoms.plan.recompute != "none":
        suspects.append("what is recomputed is not what was computed")
    return known + either(suspects)


def _weight_gradient(symptoms: Symptoms) -> str:
    known = "the gradient of the layer's output is equal, and that of its weight is not: "
    if symptoms.difference.inside is not None:
        return known + symptoms.difference.inside.sentence
    return known + either(
        [
            "it is made of another input or output gradient than the layer's",
            "what was added before is lost or counts more than once",
            "something else is added",
        ]
    )


def _reduction(symptoms: Symptoms) -> str:
    plan = symptoms.plan
    known = "what each micro-batch gave is right, as far as that is compared"
    degrees = {"dp": plan.dp, "cp": plan.cp, "tp": plan.tp, "pp": plan.pp}
    if symptoms.of_experts:
        degrees |= {"edp": sizes_of_plan(plan)["edp"], "etp": plan.etp}
    axes = [axis for axis, size in degrees.items() if size > 1]
    if not axes:
        return f"{known}, and something changed the gradients afterwards"
    return (
        f"{known}: either a reduction (here over {', '.join(axes)}) is wrong, as where it is missing, done "
        "twice, too early or over other ranks, or something changed the gradients afterwards"
    )


def _load(symptoms: Symptoms) -> str:
    suspects = ["another tensor's", "changed"]
    if symptoms.plan.world > 1:
        suspects.insert(0, "another shard of it")
    return f"what was loaded is not what was saved: it is {either(suspects)}"


def _initial(symptoms: Symptoms) -> str:
    another = ", or another shard of it" if symptoms.plan.world > 1 else ""
    return f"a parameter starts from another value: another seed{another}"


def _optimizer(symptoms: Symptoms) -> str:
    known = "the gradients are equal, and what the optimizer makes of them is not"
    return f"{known}: {of_the_optimizer(symptoms.plan)}"


UNEXPLAINED: Mapping[StepPhase, str | Callable[[Symptoms], str]] = {
    StepPhase.FORWARD: _forward,
    StepPhase.LOSS: _loss,
    StepPhase.INPUT_GRADIENT: _input_gradient,
    StepPhase.REDUCTION: _reduction,
    StepPhase.LOAD: _load,
    StepPhase.INITIAL: _initial,
    StepPhase.OPTIMIZER: _optimizer,
    StepPhase.BATCH: (
        "on one rank, too, the loss of the batch is not that of its micro-batches: the model or the loss "
        "depends on how the batch is cut, as statistics over rows do, or a loss whose total is no sum over "
        "rows"
    ),
    StepPhase.INPUT: _input,
    StepPhase.PARAMETERS: (
        "the shards are right on the ranks that hold them, and what was gathered of them is not: from "
        "other ranks, to other places, too early, not at all, or changed on its way"
    ),
    StepPhase.MESSAGE: (
        "what one stage sent is not what the next one got: either it was changed on its way, as in a "
        "buffer that was used again too early, or it is another message"
    ),
    StepPhase.ROUTING: "the layer's input is equal, and experts are chosen otherwise",
    **dict.fromkeys((StepPhase.SCALES, StepPhase.GRADIENT_SCALES), OTHER_SCALES),
    StepPhase.RECOMPUTED_ROUTING: "experts are chosen otherwise when the layer runs again in its backward",
    StepPhase.LOSS_GRADIENT: (
        "the loss is equal, and its gradient is not: either it starts with another scale, or the backward "
        "of the loss is not that of its forward"
    ),
    StepPhase.GRADIENT_MESSAGE: (
        "what one stage sent is not what the stage before got: either it was changed on its way, as in a "
        "buffer that was used again too early, or it is another message"
    ),
    StepPhase.WEIGHT_GRADIENT: _weight_gradient,
    StepPhase.MEAN_LOSS: (
        "the loss of each micro-batch is equal, and their mean is not: either it is divided by another "
        "weight, or not all of them are in it once"
    ),
    StepPhase.EXPERT_LOAD: (
        "the experts of each token are equal, and what is counted or averaged of them is not: tokens are "
        "left out, count more than once, or are padding"
    ),
    StepPhase.NORM: "the gradients are equal, and their norm is not",
    StepPhase.CLIP: "the norm is equal: gradients are scaled by another factor, or not all of them",
    StepPhase.EVALUATION: (
        "training is equal, and evaluation is not: another mode, other parameters, other rows, or another "
        "weight"
    ),
}
