"""`plait.verify`: runs reference and candidate, on local or a launcher's ranks, and makes the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import nn

from plait.errors import ModelError, PlanError
from plait.models.layers.layer_sequence import sequence_of
from plait.models.lora import refuse_adapted_output
from plait.optimizers.optimizer_makers import MakeOptimizer
from plait.plan.argument_checks import require_instance, require_number
from plait.plan.plan import Plan
from plait.plan.rules import Rule, Rules
from plait.ranks.launch.launch import launch
from plait.tensor.chunked_cross_entropy import output_linear_name, require_cross_entropy
from plait.tensor.experts.experts import Experts
from plait.tensor.losses import Loss, cross_entropy
from plait.tensor.nested_values import Value
from plait.tensor.torch_losses import GivenLoss, as_loss
from plait.verification.case import Case
from plait.verification.diagnosis.cause import likely_cause
from plait.verification.diagnosis.symptoms import Symptoms
from plait.verification.findings import Tally
from plait.verification.independent_comparison import compare_with_reference
from plait.verification.independent_model_report import IndependentReport, report_of_all
from plait.verification.independent_reference import IndependentReference
from plait.verification.options import Mode, VerifyOptions, adamw, usual_steps
from plait.verification.rank_verification import RankOutcome, verify_rank
from plait.verification.report import FirstDifference, VerificationReport
from plait.verification.step_batches import batches_of_steps, rows_of
from plait.verification.step_location import Location, StepPhase
from plait.verification.sweep import RefusedPlan, ReportProgress, Sweep, plans_on, verify_plans


def build_report(outcomes: Sequence[RankOutcome], plan: Plan, options: VerifyOptions) -> VerificationReport:
    """Return the report on `plan` from the outcomes of all its ranks, rank 0 first."""
    paths = outcomes[0].paths
    tallies: dict[StepPhase, Tally] = {}
    for phase in StepPhase:
        own = [outcome.findings.tallies[phase] for outcome in outcomes if phase in outcome.findings.tallies]
        if own:
            tallies[phase] = Tally(
                sum(tally.compared for tally in own),
                sum(tally.different for tally in own),
                max(tally.used for tally in own),
                max(tally.relative for tally in own),
                sum(tally.vague for tally in own),
            )
    first = _first_difference(outcomes, plan, paths)
    others = [
        difference
        for outcome in outcomes
        for difference in outcome.findings.differences
        if first is not None and difference.location != first.difference.location
    ]
    return VerificationReport(
        plan=plan,
        options=options,
        clip=outcomes[0].clip,
        tallies=tallies,
        first=first,
        others=tuple(sorted(others, key=lambda difference: difference.location.order(len(paths)))),
        paths=paths,
        left_out=outcomes[0].findings.left_out,
        seconds=max(outcome.seconds for outcome in outcomes),
    )


def _first_difference(
    outcomes: Sequence[RankOutcome], plan: Plan, paths: Sequence[str]
) -> FirstDifference | None:
    evidence = {o.rank: o.findings.evidence for o in outcomes if o.findings.evidence is not None}
    if not evidence:
        return None
    chosen = min(evidence, key=lambda rank: (evidence[rank].location.order(len(paths)), rank))
    difference = outcomes[chosen].findings.differences[0]
    location = difference.location
    same = {rank: own for rank, own in evidence.items() if own.location == location}
    ranks = tuple(  # at the location, possibly in another parameter
        rank for rank, own in evidence.items() if replace(own.location, name=location.name) == location
    )
    partitioned = set[int]().union(*(outcome.findings.partitioned for outcome in outcomes))
    with_losses = set[int]().union(*(outcome.findings.with_router_losses for outcome in outcomes))
    with_experts = set[int]().union(*(outcome.findings.with_experts for outcome in outcomes))
    inside = [outcomes[rank].findings.differences[0].inside for rank in same]
    earliest = min((one for one in inside if one is not None), key=lambda one: one.order, default=None)
    symptoms = Symptoms(
        difference=replace(difference, inside=earliest),
        evidence=same,
        coordinates=[outcome.coordinate for outcome in outcomes],
        compared_on=[
            outcome.rank
            for outcome in outcomes
            if _compares(outcome, outcomes[chosen], location)
            and (outcome.rank in same or outcome.rank not in ranks)
        ],
        plan=plan,
        partitioned=bool(partitioned) if location.layer is None else location.layer in partitioned,
        of_experts=bool(with_experts) if location.layer is None else location.layer in with_experts,
        has_router_losses=location.layer in with_losses,
    )
    layer = location.layer
    return FirstDifference(
        difference=difference,
        ranks=ranks,
        coordinates=tuple(dict(outcomes[rank].coordinate) for rank in ranks),
        layer=paths[layer] if layer is not None and 0 <= layer < len(paths) else "",
        cause=likely_cause(symptoms),
    )


def _compares(outcome: RankOutcome, chosen: RankOutcome, location: Location) -> bool:
    """Return whether a rank compares the tensor, or a part of it, that `chosen` compares at `location`."""
    if location.phase is StepPhase.BATCH:
        return outcome is chosen
    if location in outcome.findings.empty:
        return False
    axes = ("pp",) if location.microbatch is None else ("pp", "replicate", "shard")
    return all(outcome.coordinate[axis] == chosen.coordinate[axis] for axis in axes)


Result = TypeVar("Result")


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    inputs: Value,
    targets: Value,
    loss: GivenLoss = cross_entropy,
    *,
    rules: Rules | None = None,
    mode: Mode = "float64",
    steps: int | None = None,
    optimizer: MakeOptimizer = adamw,
    clip: float | None = None,
    isolate: bool = False,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    timeout: float = 600.0,
    ranks_as: Literal["processes", "threads"] = "processes",
    ranks_per_gpu: int = 1,
    reference: Callable[[Any], Any] | None = None,
) -> VerificationReport | IndependentReport:
    """Compare `model`, parallelized by `plan`, with one device, and report the first difference, if any.

    Trains on one rank in plain PyTorch, then on `plan.world` ranks from the same values and data. Compares in
    order: each layer's output and input gradient, each micro-batch's weight gradients, final gradients, loss,
    norm, after a step (of `Engine.step`, or by hand) parameters and optimizer state. Then saves, loads into a
    new engine and under another plan, and takes one more step; not in mode `exact`.
    Returns the report, on every rank: true where both are equal. Raises PlaitError as `parallelize` does.

    Args:
        model: as `parallelize` takes it, or a function that builds it. It is not altered.
        plan: the plan to verify. In modes `float64` and `exact` its precision is `fp64`.
        inputs: those of a global batch, along dim 0; later steps take its rows in another order.
        targets: likewise.
        loss: as `parallelize` takes it.
        rules: likewise.
        mode: `float64`, in which little but a mistake is larger than rounding; `native`, with all precisions
            and the loss scale of the plan; `exact`, in whole numbers, where equality is that of bits.
        steps: training steps to compare; by default 2, in mode `exact` 1.
        optimizer: makes one as in `fit`; AdamW by default. But in `native`, Muon iterates in float64.
        clip: the maximum gradient norm; None: a third of the first step's, so that clipping is exercised.
        isolate: replace each value that differs by the reference's, so that a mistake makes one difference.
        seed: seed of parameters that the model leaves uninitialised.
        device: as in `plait.launch`.
        threads: likewise.
        timeout: seconds that a rank waits for another.
        ranks_as: likewise.
        ranks_per_gpu: likewise.
        reference: an independent model, any callable from `inputs`: its outputs, loss, gradients in float64.
    """
    _require_types(model, plan, timeout)
    other = _independent(reference, mode=mode, steps=steps, clip=clip, isolate=isolate, optimizer=optimizer)
    if steps is None:
        steps = usual_steps(mode) if other is None else 1
    options = VerifyOptions(
        mode=mode, steps=steps, clip=clip, optimizer=optimizer, isolate=isolate, seed=seed, resumes=True
    )
    batches = batches_of_steps(inputs, targets, steps, plan.dp * plan.microbatches)
    case = Case(model, as_loss(loss), batches, options, rules, device, timeout, ranks_as, ranks_per_gpu)
    return verify_case(case, plan, other, threads=threads)


def _require_types(model: object, plan: object, timeout: object) -> None:
    """Raise PlanError or ModelError for an argument of another type, or out of range."""
    require_instance("the plan", plan, Plan, "give a plait.Plan", PlanError)
    if not callable(model):
        raise ModelError(f"the model is {model!r}: give an nn.Module, or a function that builds one.")
    require_number("timeout", timeout, PlanError, positive=True, infinite="no limit")


def verify_case(
    case: Case, plan: Plan, reference: IndependentReference | None = None, *, threads: int | None = None
) -> VerificationReport | IndependentReport:
    """Compare `plan` on the batches of `case`, one for each step, with one device or an independent model."""
    if reference is None:
        outcomes = _launch(partial(verify_rank, case, plan), case, plan.world, threads)
        return build_report(outcomes, plan, case.options)
    compare = partial(compare_with_reference, case, plan, reference)
    return report_of_all(_launch(compare, case, plan.world, threads))


def _itself(reference: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return reference


def _independent(reference: Callable[[Any], Any] | None, **given: object) -> IndependentReference | None:
    """Return the reference of `verify`, if any; PlanError for another argument that does not go with it."""
    if reference is None:
        return None
    if not callable(reference):
        raise PlanError(f"the reference is {reference!r}: give an nn.Module, or a function of the inputs.")
    usual = {"mode": "float64", "steps": None, "clip": None, "isolate": False, "optimizer": adamw}
    for name, value in given.items():
        if value != usual[name]:
            raise PlanError(
                f"{name} = {value!r} does not go with a reference, whose forward and backward run in "
                "float64 for one batch: leave it out, and verify the rest without a reference."
            )
    return IndependentReference(partial(_itself, reference))


def verify_all(
    case: Case,
    plan: Plan,
    ranks: int,
    *,
    threads: int | None = None,
    report_progress: ReportProgress | None = None,
) -> Sweep:
    """Verify every layout, schedule and sharding that `ranks` ranks allow, with the other fields of `plan`.

    A plan that the model does not allow (heads that do not divide, more stages than layers) is listed with
    the reason. Sequences are cut where the model has a rule for that, experts are divided where it has some,
    and the loss is computed in chunks of rows where it can be. Rank 0 calls `report_progress` after each plan
    that it has run.
    """
    model = case.build()
    rules = case.rules_of(model) or {}
    in_parts = any(isinstance(rule, Rule) and rule.kind == "sequence" for rule in rules.values())
    in_chunks = case.options.mode != "exact" and _computes_loss_in_chunks(case.loss, model)
    rows = rows_of(case.batches[0][0])
    with_experts = any(isinstance(module, Experts) for module in model.modules())
    how = {"in_parts": in_parts, "in_chunks": in_chunks, "with_experts": with_experts}
    plans = plans_on(ranks, plan, rows, **how)
    outcomes = _launch(partial(verify_plans, case, plans, report_progress), case, ranks, threads)
    results: list[tuple[Plan, VerificationReport | RefusedPlan]] = []
    for one, of_ranks in zip(plans, zip(*outcomes, strict=True), strict=True):
        refused = [outcome for outcome in of_ranks if isinstance(outcome, RefusedPlan)]
        found = [outcome for outcome in of_ranks if not isinstance(outcome, RefusedPlan)]
        results.append((one, refused[0] if refused else build_report(found, one, case.options)))
    return Sweep(ranks, tuple(results))


def _computes_loss_in_chunks(loss: Loss, model: nn.Module) -> bool:
    """Return whether plans with `loss_rows` can run, as far as known before the last layer runs."""
    last = sequence_of(model).layers[-1]
    try:
        require_cross_entropy(loss, 1)
        refuse_adapted_output(last, 1)
        output_linear_name(last, {}, 1)
    except PlanError:
        return False
    return True


def _launch(function: Callable[[], Result], case: Case, ranks: int, threads: int | None) -> list[Result]:
    return launch(
        function,
        ranks=ranks,
        threads=threads,
        timeout=case.timeout,
        device=case.device,
        ranks_as=case.ranks_as,
        ranks_per_gpu=case.ranks_per_gpu,
    )
